# What the device scripts share; sourced, from the repository's root.

# Finds the CUDA libraries that Python packages bring, where the system has none.
libraries() {
    LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:$(python3 -c 'import nvidia, os
print(":".join(os.path.join(p, d, "lib") for p in nvidia.__path__ for d in os.listdir(p)))' 2>/dev/null || true)"
    export LD_LIBRARY_PATH
}

# unpack FILE: FILE from FILE.xz, unless it is there and newer.
unpack() {
    [ -x "$1" ] && [ "$1" -nt "$1.xz" ] && return
    python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' "$1.xz" "$1"
    chmod +x "$1"
}

# pack BINARY FILE: FILE.xz of BINARY, stripped.
pack() {
    mkdir -p "$(dirname "$2")"
    strip -o "$2" "$1"
    xz -1 -f -T0 "$2"
    ls -l "$2.xz"
}

# usage SCRIPT: the comment that SCRIPT begins with.
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"
    exit 2
}
