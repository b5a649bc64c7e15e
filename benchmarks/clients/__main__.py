"""Installs each client of clients.toml separately, drives it against a server, and writes docs/clients.md.

A scripted model answers. Its output depends on the case that the prompt names, and on whether a tool's result has come
back. A client passes a case if it exits with 0 and prints "drizzles", which only the last answer contains.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.scripted import scripted_model
from tests.support.server import serving

HERE = Path(__file__).parent
CASES = ("loop", "stream", "schema", "overflow")
CONTEXT = 40_960
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TEMPLATE = """\
{%- set found = namespace(name='', back='0') -%}
{%- for message in messages -%}
{%- set text = message.content | string -%}
{%- if 'case:' in text -%}
{%- set found.name = text.split('case:')[-1].split(';')[0] -%}
{%- set found.back = '1' if 'R41N' in text.split('case:')[-1] else '0' -%}
{%- elif message.role != 'assistant' and 'R41N' in text -%}{%- set found.back = '1' -%}{%- endif -%}
{%- if 'overflow' in found.name -%}{{- text -}}{%- endif -%}
{%- endfor -%}
{#- <tool_call> MARKS -#}
{{- '<|' ~ found.name ~ found.back ~ '|>' -}}"""


def table() -> dict[str, dict[str, Any]]:
    """Return the table of clients.toml, by client."""
    read: dict[str, dict[str, Any]] = tomllib.loads((HERE / "clients.toml").read_text())
    return read


def scripts_of(client: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's outputs for a client by case; suffix 0 before a tool's result, 1 after it."""
    tool, arguments = client.get("tool", ["get_weather", {"city": "Paris"}])
    return {
        "loop0": "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>",
        "loop1": "It drizzles in Paris.",
        "stream0": "One drizzles, two, three.",
        "schema0": '{"city": "drizzles"}',
        "schema1": '{"city": "drizzles, then"}',
        "overflow0": "Too short to be cut.",
    } | client.get("says", {})


@contextmanager
def server_of(client: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Serve a client's scripted model; yield the server's URL."""
    scripted_model(folder / "model", scripts_of(client), "", template=TEMPLATE, context=CONTEXT)
    limits = ("parallel.threads=1", f"cache.num_blocks={CONTEXT // 8}", "serve.model_name=model")
    with serving(folder, "model=./model", *limits) as server:
        yield server.url


def installed(name: str, client: Mapping[str, Any], cache: Path) -> Path:
    """Return the folder of a client's programs; install them if missing."""
    folder = cache / name
    if (folder / "done").exists() and (folder / "done").read_text() == repr(client["packages"]):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if client["registry"] == "npm":
        (folder / "package.json").write_text("{}")
        install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *client["packages"]]
        subprocess.run(install, cwd=folder, check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, *client["packages"]], check=True)
    (folder / "done").write_text(repr(client["packages"]))
    return folder


def drive(client: Mapping[str, Any], case: str, url: str, programs: Path) -> str:
    """Run one case of a client in its own home; return "yes", or what it printed or did instead."""
    words = client.get(case) or client["run"]
    if words == ["-"]:
        return "—"
    with tempfile.TemporaryDirectory() as home:
        prompt = f"case:{case};" + (" Paris" * 12_000 if case == "overflow" else " What is the weather in Paris?")
        schema = json.dumps(SCHEMA)
        values = {"url": url, "prompt": prompt, "case": case, "home": home, "here": str(HERE), "schema": schema}
        env = {
            "PATH": f"{programs}/bin:{programs}/node_modules/.bin:{os.environ['PATH']}",
            "NODE_PATH": f"{programs}/node_modules",
            "HOME": home,
            "NO_PROXY": "*",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "ANTHROPIC_API_KEY": "none",
        } | {key: _filled(value, values) for key, value in client.get("env", {}).items()}
        for file, text in ({"schema.json": schema} | client.get("files", {})).items():
            path = Path(home) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(text, values))
        command = [_filled(word, values) for word in words]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            ran = subprocess.run(command, cwd=home, env=env, timeout=90, **pipes)
        except subprocess.TimeoutExpired as late:
            return "still runs after 90 s: " + _last(str(late.stderr or late.stdout or ""))
    said = ran.stdout + ran.stderr
    if os.environ.get("SHOW"):
        print(said[-6000:], file=sys.stderr)
    if case != "overflow":
        return "yes" if "drizzles" in said and not ran.returncode else f"no ({ran.returncode}): {_last(said)}"
    told = re.search(r"context (length|window|limit)|context_length|too long", said, re.IGNORECASE)
    return ("reports it" if told else "reports nothing") + f", exits with {ran.returncode}"


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"%{key}%", value)
    return text


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing printed"]
    return lines[-1][-120:].replace("|", "/")


def page(rows: Mapping[str, Mapping[str, str]], date: str) -> str:
    """Return docs/clients.md."""
    head = (HERE / "page.txt").read_text().replace("DATE", date)
    lines = ["| client | version | tool loop | stream | schema | overflow |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {row['version']} | " + " | ".join(row[case] for case in CASES) + " |" for name, row in rows.items()
    ]
    return head.replace("TABLE", "\n".join(lines))


def main() -> None:
    clients = table()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(clients), metavar="CLIENT", help="the page stays as it is")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "gapless-clients", help="for installs")
    asked = parser.parse_args()
    rows: dict[str, dict[str, str]] = {}
    for name in asked.only or clients:
        client = clients[name]
        rows[name] = {"version": client["packages"][0].rpartition("==" if client["registry"] == "pip" else "@")[2]}
        try:
            programs = installed(name, client, asked.cache)
        except subprocess.CalledProcessError:
            rows[name] |= dict.fromkeys(CASES, "not installed")
            continue
        with tempfile.TemporaryDirectory() as folder, server_of(client, Path(folder)) as url:
            for case in asked.cases:
                rows[name][case] = drive(client, case, url, programs)
                print(f"{name} {case}: {rows[name][case]}", flush=True)
    if not asked.only and asked.cases == CASES:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        (HERE.parents[1] / "docs" / "clients.md").write_text(page(rows, date))
    if any(value.startswith(("no", "still runs")) for row in rows.values() for value in row.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
