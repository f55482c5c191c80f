"""The gRPC vocabulary, version 1: `entresol.proto` and the code generated from it.

Nothing in `entresol_proto` imports this package: only the daemon's gRPC surface and the command
line tools need grpc and protobuf, which inference engines pin to versions of their own.
"""
