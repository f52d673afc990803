# The wheel of tools/wheel on a plain Debian 12, without a compiler: two ranks train by the program of the quick start.
# In a clone, after tools/wheel: docker build --file tools/packaging/debian-12.Dockerfile .
# Without Docker: python3 test/package/chroot.py tools/packaging/debian-12.Dockerfile
FROM debian:bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3-venv
COPY dist/libfsdp-*-cp311-*.whl /package/
RUN python3 -m venv /environment && /environment/bin/pip install --progress-bar off /package/*.whl
COPY docs/start/quickstart-python.md /package/
RUN sed -n '/^```python$/,/^```$/p' /package/quickstart-python.md | grep -v '^```' > /package/quickstart.py
RUN /environment/bin/torchrun --standalone --nproc-per-node 2 /package/quickstart.py
