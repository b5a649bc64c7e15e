# The image for KubeRay, over that of the Dockerfile at the root: the dashboard that takes jobs, and wget, with which KubeRay
# asks its containers how they are. docker build -t gapless-ray -f docs/deploy/ray.Dockerfile .
ARG BASE=gapless
FROM ${BASE}
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN python -m pip install --no-cache-dir "ray[default]==$(python -c 'from importlib.metadata import version; print(version("ray"))')"
USER gapless
