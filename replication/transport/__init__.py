"""Bytes between nodes, and to a daemon: frames, channels, clients, certificates, handshakes, files that are fetched.

Above `protocol`. gRPC is spoken here, and by the servers and links of the daemon.
"""
