# docker build -t gapless .
# docker run --rm --shm-size=2g gapless generate parallel=pp2 prompt="import os"
# docker run --rm --shm-size=2g --user "$(id -u)" -v "$PWD:/srv/gapless" \
#     gapless generate model=./my-llama prompts=prompts.jsonl
# docker run --rm --shm-size=2g -p 127.0.0.1:8000:8000 gapless serve serve.host=0.0.0.0
#
# With GPUs: --build-arg BASE=(an image with the CUDA 12 runtime, Debian or Ubuntu) --build-arg EXTRAS="[cuda]", and
# `docker run --gpus all`. TORCH names another build of torch, TORCH_OPTIONS where pip finds it (`--index-url URL`).
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS base
RUN python3 -m venv --help > /dev/null 2>&1 \
    || { apt-get update \
         && apt-get install --yes --no-install-recommends python3 python3-venv \
         && rm -rf /var/lib/apt/lists/*; }

FROM base AS build
ARG TORCH=
ARG TORCH_OPTIONS=
ARG EXTRAS=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/gapless
WORKDIR /src
COPY constraints.txt ./
RUN /opt/gapless/bin/pip install ${TORCH_OPTIONS} "${TORCH:-$(grep '^torch==' constraints.txt)}"
COPY . ./
RUN if [ -n "$TORCH" ]; then sed -i '/^torch==/d' constraints.txt; fi \
    && /opt/gapless/bin/pip install -c constraints.txt ".${EXTRAS}"

FROM base
COPY --from=build /opt/gapless /opt/gapless
RUN useradd --create-home gapless && mkdir /srv/gapless && chown gapless /srv/gapless
# A uid of `docker run --user` has no name and no home.
ENV PATH=/opt/gapless/bin:$PATH USER=gapless HOME=/tmp
USER gapless
WORKDIR /srv/gapless
EXPOSE 8000
ENTRYPOINT ["gapless"]
CMD ["--help"]
