# syntax=docker/dockerfile:1

FROM rust:1-bookworm AS build
WORKDIR /build
# One file without a loader or a library beside it, with the frame pointers that CPU profiles walk along.
ENV RUSTFLAGS="-C target-feature=+crt-static -C force-frame-pointers=yes"

# The dependencies are a layer of their own: it is built anew only when a manifest changes. Benches are not part of it.
COPY Cargo.toml Cargo.lock ./
COPY tests/fake-discord/Cargo.toml tests/fake-discord/
RUN sed -i '/^\[\[bench\]\]/,/^$/d' Cargo.toml \
    && mkdir -p src tests/fake-discord/src \
    && echo 'fn main() {}' | tee src/main.rs > tests/fake-discord/src/main.rs \
    && touch src/lib.rs tests/fake-discord/src/lib.rs \
    && cargo build --release --locked --bin nirn-proxy --target "$(rustc -vV | sed -n 's/^host: //p')"

COPY . .
# A file that is newer than what was built from its stub, so that cargo looks at it again.
RUN touch src/main.rs src/lib.rs \
    && cargo build --release --locked --bin nirn-proxy --target "$(rustc -vV | sed -n 's/^host: //p')" \
    && install -D -m 755 target/*/release/nirn-proxy /root-of-image/nirn-proxy

# What a process expects around it: roots to trust, a user, the order of name look-ups, a folder for bodies kept on disk.
RUN cd /root-of-image \
    && mkdir -p etc/ssl/certs \
    && cp /etc/ssl/certs/ca-certificates.crt etc/ssl/certs/ \
    && echo 'nirn:x:65532:65532:nirn-proxy:/:/nirn-proxy' > etc/passwd \
    && echo 'nirn:x:65532:' > etc/group \
    && echo 'hosts: files dns' > etc/nsswitch.conf \
    && install -d -m 1777 tmp

FROM scratch
LABEL org.opencontainers.image.title="nirn-proxy" \
      org.opencontainers.image.description="A clustered HTTP reverse proxy for Discord's REST API" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /root-of-image/ /
USER 65532:65532
# The proxy, its metrics, gossip between nodes, and requests between nodes.
EXPOSE 8080 9000 7946/tcp 7946/udp 8443
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 CMD ["/nirn-proxy", "--healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/nirn-proxy"]
