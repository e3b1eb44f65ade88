# deftune for a CPU (the default) or for CUDA:
#   docker build -t deftune .
#   docker build -t deftune:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm -v "$PWD:/work" deftune train run.yaml
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# a C compiler: pip compiles pycosat (of reasoning-gym), and Triton the fused loss
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/deftune
# torch has a layer of its own: a change of deftune does not install torch again
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[eval]"

# models stay in the mounted folder; other caches go where every user of `docker run --user` can write
ENV DEFTUNE_CACHE=/work/.cache/deftune HF_HOME=/work/.cache/huggingface HOME=/tmp
WORKDIR /work
ENTRYPOINT ["deftune"]
CMD ["doctor"]
