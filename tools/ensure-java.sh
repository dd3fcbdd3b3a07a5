#!/bin/sh
# Finds a Java 17+ runtime; installs one where that is allowed (root on Debian or Ubuntu), else says what to install.
set -eu

java_major() {
    "$1" -version 2>&1 | sed -n '1s/.*version "\([0-9]*\).*/\1/p'
}

java_path() {
    if [ -n "${JAVA_HOME:-}" ] && [ -x "$JAVA_HOME/bin/java" ]; then
        echo "$JAVA_HOME/bin/java"
    else
        command -v java || true
    fi
}

good_enough() {
    found=$(java_path)
    [ -n "$found" ] && major=$(java_major "$found") && [ -n "$major" ] && [ "$major" -ge 17 ]
}

if good_enough; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "No Java 17+ found; installing openjdk-17-jre-headless ..."
    apt-get update -q >/dev/null || true
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y openjdk-17-jre-headless >/dev/null
    unset JAVA_HOME
    if good_enough; then
        exit 0
    fi
fi
cat >&2 <<'EOF'
error: Spark needs a Java runtime, version 17 or newer, and none was found (on PATH or in JAVA_HOME).
  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless
  Fedora, RHEL:    sudo dnf install java-17-openjdk-headless
  macOS:           brew install openjdk@17
EOF
exit 1
