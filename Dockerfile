# The server on CPUs. Kernels for all instruction sets of the platform are compiled in the first stage; the second has no
# compiler. docs/deploy.md says how it is built and run.
ARG PYTHON=python:3.13-slim-bookworm

FROM ${PYTHON} AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/foretell
WORKDIR /src
COPY constraints.txt ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/foretell/bin/pip install --no-compile -c constraints.txt --extra-index-url ${TORCH_INDEX} torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN FORETELL_PREBUILD=1 /opt/foretell/bin/pip wheel --no-deps --wheel-dir /wheels .
RUN /opt/foretell/bin/pip install --no-compile -c constraints.txt "$(ls /wheels/*.whl)[serve]"
# What no model needs at run time. The commands make byte code of what is imported, and show that it runs without a compiler.
RUN cd /opt/foretell/lib/python3*/site-packages \
    && rm -rf torch/test torch/include torch/share \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && find numpy sympy networkx -name tests -type d -prune -exec rm -rf {} + \
    && strip --strip-unneeded torch/lib/*.so \
    && PATH=/opt/foretell/bin foretell generate "def add(a, b):" --target bundled --max-new-tokens 4 2> /tmp/said \
    && ! grep slower /tmp/said \
    && /opt/foretell/bin/python -c "import foretell.server.app, foretell.server.run" \
    && rm -rf /root/.cache

FROM ${PYTHON}
COPY --from=build /opt/foretell /opt/foretell
RUN useradd --uid 10001 --create-home foretell && mkdir /models && chown foretell /models
ENV PATH=/opt/foretell/bin:$PATH FORETELL_CACHE=/models/cache FORETELL_MODELS=/models HF_HOME=/models/hub
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=2m --interval=30s --timeout=6s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["foretell"]
CMD ["serve", "--host", "0.0.0.0"]
