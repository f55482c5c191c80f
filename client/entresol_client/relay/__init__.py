"""What routers read: a tenant's events in vLLM's wire form, on ZMQ, published by the tenant itself.

Events carry token ids and ZMQ has no authentication, so the daemon does not publish on it: a relay
runs where the tenant's routers are, under the tenant's certificate. `keys`, `layouts`, `chain` and
`wire` are pure; `publisher` has the sockets, `feed` the daemon's streams, `service` the loop.
"""
