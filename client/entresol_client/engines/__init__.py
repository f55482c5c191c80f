"""What makes Entresol a tier of an inference engine: one neutral core, one thin adapter each.

`settings`, `store`, `naming`, `asker` and `logs` know no engine. An adapter imports its engine and
these, never another adapter; nothing here imports grpc, protobuf or pyarrow, which engines pin
themselves.
"""
