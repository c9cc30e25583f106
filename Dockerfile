# fastclip on the official PyTorch image: both libraries are compiled beside the toolkit of the devel image and
# installed into the runtime image, which has neither compiler nor sources.
#   docker build --tag fastclip .
#   docker run --rm --gpus all fastclip
# Other images: --build-arg PYTORCH=2.12.1 --build-arg CUDA=13.0. The tags are those of
# https://hub.docker.com/r/pytorch/pytorch/tags, torch 2.10 or later and CUDA 12.1 or later.
ARG PYTORCH=2.13.0
ARG CUDA=13.0

FROM pytorch/pytorch:${PYTORCH}-cuda${CUDA}-cudnn9-devel AS build

# Other GPUs than the usual ones, such as "9.0;10.0+PTX"; empty for the usual ones.
ARG TORCH_CUDA_ARCH_LIST=""
# The image's Python belongs to its system, which pip would otherwise not touch.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m pip install "setuptools==84.2.1" "wheel==0.48.0"
WORKDIR /source
COPY . .
# "cuda" fails, with the reason, where "auto" would build less.
RUN FASTCLIP_BUILD=cuda python -m pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .

FROM pytorch/pytorch:${PYTORCH}-cuda${CUDA}-cudnn9-runtime

ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-deps --no-index /wheels/*.whl
RUN useradd --create-home --uid 10001 fastclip
USER 10001
WORKDIR /home/fastclip
CMD ["fastclip", "doctor"]
