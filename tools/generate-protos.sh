#!/bin/sh
# Generates proto/v1/*_pb2*.py from the .proto files. They are committed, and a test compares them with what this makes.
set -eu
out=${1:-proto/v1}
python=${PYTHON:-.venv/bin/python}
"$python" -m grpc_tools.protoc --proto_path=nosync/proto/v1=proto/v1 --python_out="$out" --pyi_out="$out" \
    --grpc_python_out="$out" nosync/proto/v1/replication.proto
# protoc writes below the path of the import; the files belong beside their .proto.
mv "$out"/nosync/proto/v1/replication_pb2* "$out"/
rmdir -p "$out"/nosync/proto/v1 2>/dev/null || true
