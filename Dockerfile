# isobit on a GPU machine: docker build -t isobit . && docker run --gpus all -v "$PWD/runs:/isobit/runs" isobit quickstart
# Not built by the project's tests, which have no Docker.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /isobit
COPY . .
# the build of PyTorch for CUDA; for a CPU image: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=
RUN make install TORCH_INDEX="$TORCH_INDEX"
ENV PATH=/isobit/.venv/bin:$PATH
ENTRYPOINT ["isobit"]
CMD ["doctor"]
