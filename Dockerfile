# For machines with NVIDIA GPUs. It has not been built or run yet: nothing of this project has run on a GPU so far.
#
#   docker build -t ds_encdec .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/output:/workspace/output" ds_encdec \
#       deepspeed --num_gpus 8 ds_encdec/train.py
#
# The toolkit in the image (nvcc, by which DeepSpeed compiles its CPU Adam) and torch's build must be of one CUDA version.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libaio-dev ninja-build openssh-client pdsh python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH CUDA_HOME=/usr/local/cuda

WORKDIR /workspace
# What changes rarely comes first, so that an edit of the source does not install torch again.
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt --index-url "$TORCH_INDEX" \
        --extra-index-url https://pypi.org/simple torch==2.13.0
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt --editable '.[qlora,eval]'
CMD ["ds-encdec", "--help"]
