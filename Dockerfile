# Ferry in a container, from a wheel of `make wheels`: nothing is compiled. FERRY_CUDA=1 takes the one
# with the CUDA engine; the driver comes from the host (NVIDIA Container Toolkit).
#   make wheels && docker build -t ferry .
#   make wheels && docker build -t ferry-cuda --build-arg FERRY_CUDA=1 .
# Ranks meet in shared memory, of which Docker gives 64 MB unless told otherwise:
#   docker run --rm --shm-size=2g -v $PWD:/work -w /work ferry ferry run -n 4 -- python program.py
#   docker run --rm --shm-size=2g --gpus all ferry-cuda
ARG BASE=debian:12-slim
FROM ${BASE}
ARG FERRY_CUDA=0
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libfabric1 && rm -rf /var/lib/apt/lists/*
COPY dist /usr/src/ferry
RUN if [ "$FERRY_CUDA" = 1 ]; then wheels=/usr/src/ferry/cuda; else wheels=/usr/src/ferry; fi && python3 -m venv /opt/ferry && /opt/ferry/bin/pip install --no-cache-dir --no-deps --no-index --find-links $wheels ferry-moe
RUN /opt/ferry/bin/pip install --no-cache-dir "ferry-moe[metrics]" && rm -rf /usr/src/ferry
ENV PATH=/opt/ferry/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["ferry", "doctor"]
