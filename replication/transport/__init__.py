"""Bytes between nodes: frames, certificates, handshakes, files that are fetched.

Above `protocol`. Only here and in `daemon.server` is gRPC spoken.
"""
