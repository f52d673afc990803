# The source distribution of tools/wheel --sdist on a plain Debian 13, whose Python, compiler, fmt and spdlog are newer than
# Debian 12's: pip compiles it, and two ranks train by the program of the quick start.
# In a clone, after tools/wheel --sdist: docker build --file tools/packaging/debian-13.Dockerfile .
# Without Docker: python3 test/package/chroot.py tools/packaging/debian-13.Dockerfile
FROM debian:trixie
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates g++ libfmt-dev libisal-dev \
    libspdlog-dev nlohmann-json3-dev pkg-config python3-dev python3-venv
COPY dist/libfsdp-*.tar.gz /package/
RUN python3 -m venv /environment && /environment/bin/pip install --progress-bar off --verbose /package/*.tar.gz
COPY docs/start/quickstart-python.md /package/
RUN sed -n '/^```python$/,/^```$/p' /package/quickstart-python.md | grep -v '^```' > /package/quickstart.py
RUN /environment/bin/torchrun --standalone --nproc-per-node 2 /package/quickstart.py
