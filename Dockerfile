# Ferry in a container. On CPUs from the wheel, on GPUs compiled on a base image with CUDA:
#   make wheels && docker build -t ferry .
#   docker build -t ferry --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg FERRY_CUDA=1 .
# Ranks meet in shared memory, of which Docker gives 64 MB unless told otherwise:
#   docker run --rm --shm-size=2g -v $PWD:/work -w /work ferry ferry run -n 4 -- python program.py
ARG BASE=debian:12-slim
FROM ${BASE}
ARG FERRY_CUDA=0
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libfabric1 && if [ "$FERRY_CUDA" = 1 ]; then apt-get install -y --no-install-recommends g++ python3-dev libcli11-dev libfmt-dev nlohmann-json3-dev libyaml-cpp-dev libfabric-dev; fi && rm -rf /var/lib/apt/lists/*
COPY . /usr/src/ferry
RUN python3 -m venv /opt/ferry && if [ "$FERRY_CUDA" = 1 ]; then FERRY_CUDA=1 /opt/ferry/bin/pip install --no-cache-dir /usr/src/ferry; else /opt/ferry/bin/pip install --no-deps --no-index --find-links /usr/src/ferry/dist ferry-moe; fi
RUN /opt/ferry/bin/pip install --no-cache-dir "ferry-moe[metrics]" && rm -rf /usr/src/ferry
ENV PATH=/opt/ferry/bin:$PATH
CMD ["ferry", "doctor"]
