# deftune for a CPU (the default) or for CUDA:
#   docker build -t deftune .
#   docker build -t deftune:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm -v "$PWD:/work" deftune train run.yaml
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Triton compiles the fused loss with a C compiler; the environment keeps models in the mounted folder
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV DEFTUNE_CACHE=/work/.cache/deftune HF_HOME=/work/.cache/huggingface

WORKDIR /opt/deftune
COPY . .
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch \
 && pip install --no-cache-dir -c constraints.txt -e ".[eval]"

WORKDIR /work
ENTRYPOINT ["deftune"]
CMD ["doctor"]
