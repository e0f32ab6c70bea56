# The suite on a CPU: JupyterLab with the notebooks, as `make lab` starts it.
#   docker build -t hilbert . && docker run --rm -p 8888:8888 hilbert
# `docker run --rm hilbert make reports` runs every notebook instead. The image was not built where it was written. By
# hand, in an empty folder and environment of Debian 12 with Python 3.11, `make setup`, `make lab` and a notebook ran.
# torch's own index, from which --torch-backend=cpu takes the CPU build, was out of reach there.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 reader \
    && install -d -o reader /hilbert
USER reader
WORKDIR /hilbert
# torch's CPU build, which is a tenth of the CUDA build that `make setup` would take.
RUN python -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir uv \
    && .venv/bin/uv pip install --no-cache --python .venv --torch-backend=cpu torch==2.13.0
COPY --chown=reader . ./
RUN make setup
EXPOSE 8888
CMD ["make", "lab", "LAB=--no-browser --ip=0.0.0.0"]
