//! KV-cache codecs: one file each under `codecs/`.
