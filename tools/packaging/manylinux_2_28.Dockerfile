# UNTRIED: nobody has run this recipe yet. It is for a wheel that goes wherever torch's own wheels go. The image has no fmt,
# spdlog, JSON and ISA-L that are new enough, so they are compiled; ISA-L as a static library.
# In a clone: docker build --file tools/packaging/manylinux_2_28.Dockerfile --output dist .
FROM quay.io/pypa/manylinux_2_28_x86_64 AS build
RUN dnf install --assumeyes autoconf automake libtool nasm
RUN git clone --depth 1 --branch 10.2.1 https://github.com/fmtlib/fmt && \
    git clone --depth 1 --branch v1.14.1 https://github.com/gabime/spdlog && \
    git clone --depth 1 --branch v3.11.3 https://github.com/nlohmann/json && \
    git clone --depth 1 --branch v2.31.0 https://github.com/intel/isa-l
RUN cmake -S fmt -B fmt/build -DFMT_TEST=OFF && cmake --build fmt/build --target install
RUN cmake -S spdlog -B spdlog/build -DSPDLOG_FMT_EXTERNAL=ON && cmake --build spdlog/build --target install
RUN cmake -S json -B json/build -DJSON_BuildTests=OFF && cmake --build json/build --target install
RUN cd isa-l && ./autogen.sh && ./configure --prefix=/usr/local --disable-shared --with-pic && make install
ENV PKG_CONFIG_PATH=/usr/local/lib/pkgconfig:/usr/local/lib64/pkgconfig:/usr/local/share/pkgconfig
COPY . /source
RUN /opt/python/cp311-cp311/bin/pip wheel --verbose --no-deps --wheel-dir /built /source
RUN auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*' --exclude 'libnccl.so.*' \
    --wheel-dir /repaired /built/*.whl
FROM scratch
COPY --from=build /repaired/ /
