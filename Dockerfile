# docker build -t gapless .
# docker run --rm --shm-size=2g gapless generate parallel=pp2 prompt="import os"
# docker run --rm --shm-size=2g --user "$(id -u)" -v "$PWD:/srv/gapless" \
#     gapless generate model=./my-llama prompts=prompts.jsonl
# docker run --rm --shm-size=2g -p 127.0.0.1:8000:8000 gapless serve serve.host=0.0.0.0
#
# For GPUs, with `docker run --gpus all`: torch's wheels bring CUDA's libraries, and Triton compiles its launchers by gcc.
#     driver of CUDA 13 or newer: --build-arg PACKAGES="gcc libc6-dev"
#     driver of CUDA 12: --build-arg PACKAGES="gcc libc6-dev" --build-arg PINS=constraints-cuda12.txt
# PINS is constraints.txt unless given. EXTRAS="[xformers]" adds xformers, on CUDA 12. TORCH_OPTIONS says where pip finds
# another build of the pinned torch, as the one without CUDA's libraries: `--index-url URL`.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS base
RUN python3 -m venv --help > /dev/null 2>&1 \
    || { apt-get update \
         && apt-get install --yes --no-install-recommends python3 python3-venv \
         && rm -rf /var/lib/apt/lists/*; }
ARG PACKAGES=
RUN test -z "$PACKAGES" \
    || { apt-get update \
         && apt-get install --yes --no-install-recommends $PACKAGES \
         && rm -rf /var/lib/apt/lists/*; }

FROM base AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ARG PINS=constraints.txt
ARG TORCH_OPTIONS=
ARG EXTRAS=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/gapless
WORKDIR /src
COPY constraints*.txt ./
RUN /opt/gapless/bin/pip install ${TORCH_OPTIONS} "$(grep '^torch==' "$PINS")"
COPY . ./
RUN /opt/gapless/bin/pip install -c "$PINS" ".${EXTRAS}"

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
