"""The Entresol daemon: a pod-shared, sealed KV block store on flash."""
