"""Soft-RoCE guests: real RDMA devices for the tests on machines that have none.

A machine without RDMA hardware, and often with a kernel without InfiniBand, boots Debian's kernel
under QEMU with the `rdma_rxe` driver and runs the suites inside. Truth about function, not about
speed: the processor is emulated.
"""
