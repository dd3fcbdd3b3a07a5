#!/bin/sh
# Checks replication.pml with Spin, and that every planted bug breaks it. Needs spin and a C compiler.
set -eu
model=$(cd "$(dirname "$0")" && pwd)/replication.pml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

verdict() {
    spin -a "$@" "$model" >/dev/null
    cc -O2 -w -o pan pan.c
    ./pan -a -m1000000 >out 2>&1
    if grep -q 'max search depth too small' out; then
        echo "not all of it was searched" >&2
        exit 2
    fi
    sed -n 's/.*errors: \([0-9]*\).*/\1/p' out
}

failed=0
errors=$(verdict)
echo "as it is: $errors errors"
[ "$errors" = 0 ] || failed=1
for bug in ACK_EARLY OLD_ACKS NO_MANIFEST RELEASE_SEALED SYNC_UNCHECKED; do
    errors=$(verdict "-D$bug")
    echo "with $bug: $errors errors (expected: at least 1)"
    [ "$errors" != 0 ] || failed=1
done
exit $failed
