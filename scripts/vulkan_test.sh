#!/usr/bin/env bash
# Runs the README's GPU tests on software Vulkan; installs Debian's mesa-vulkan-drivers where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

lvp() {
    for icd in /usr/share/vulkan/icd.d/lvp_icd*.json; do
        if [ -e "$icd" ]; then echo "$icd"; fi
    done
}
if [ -z "$(lvp)" ]; then
    root=$([ "$(id -u)" = 0 ] || echo sudo)
    if ! { $root apt-get update -qq && $root apt-get install -qq -y --no-install-recommends mesa-vulkan-drivers; }; then
        echo "the GPU kernels need a Vulkan device: apt-get cannot install mesa-vulkan-drivers" >&2
        exit 1
    fi
fi
VK_DRIVER_FILES=$(lvp)
if [ -z "$VK_DRIVER_FILES" ]; then
    echo "mesa-vulkan-drivers is installed, but there is no lvp_icd*.json in /usr/share/vulkan/icd.d" >&2
    exit 1
fi
export VK_DRIVER_FILES VK_ICD_FILENAMES=$VK_DRIVER_FILES

# The line of the README that begins with `cargo test` and names the feature.
tests=$(grep -m 1 '^cargo test.*vulkan' README.md)
printf '\n== %s\n' "$tests"
bash -c "$tests"
