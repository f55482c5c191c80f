# Sourced by init: RDMA devices over the network that $GUEST_NET names.

modules() {
  modprobe -a ib_uverbs rdma_ucm rdma_rxe veth dummy sch_netem || return
  chmod 666 /dev/infiniband/rdma_cm
}

ready() { # wait until the device has a GID with the address: $1 device, $2 address
  for try in $(seq 100); do
    grep -qi "$(printf 'ffff:%02x%02x:%02x%02x' ${2//./ })" "/sys/class/infiniband/$1/ports/1/gids/"[0-9] && return
    sleep 0.05
  done
  echo "device $1 has no GID for $2"
  return 1
}

device() { # $1 rxe device, $2 netdev, $3 address, $4 namespace or nothing
  ip ${4:+-n "$4"} link set "$2" mtu 4200 up &&
    ip ${4:+-n "$4"} addr add "$3/24" dev "$2" &&
    ${4:+ip netns exec "$4"} rdma link add "$1" type rxe netdev "$2"
}

case $GUEST_NET in
  pair)
    modules && rdma system set netns shared &&
      ip netns add host && ip netns add dpu &&
      ip -n host link set lo up && ip -n dpu link set lo up &&
      ip link add veth_host netns host type veth peer name veth_dpu netns dpu &&
      device rxe_host veth_host 10.7.0.1 host && device rxe_dpu veth_dpu 10.7.0.2 dpu &&
      ready rxe_host 10.7.0.1 && ready rxe_dpu 10.7.0.2 || return 1
    export ENTRESOL_RDMA_DEVICE=rxe_host,rxe_dpu
    ;;
  loopback)
    modules && ip link add link0 type dummy && device rxe0 link0 10.8.0.1 &&
      ready rxe0 10.8.0.1 || return 1
    export ENTRESOL_RDMA_DEVICE=rxe0
    ;;
  wire) # one end of a wire between two machines
    modules && device rxe0 eth0 "$GUEST_ADDRESS" && ready rxe0 "$GUEST_ADDRESS" || return 1
    export ENTRESOL_RDMA_DEVICE=rxe0 ENTRESOL_RDMA_ADDRESS=$GUEST_ADDRESS ENTRESOL_RDMA_PEER=$GUEST_PEER
    ;;
esac
[ "$GUEST_NET" = none ] || chmod 666 /dev/infiniband/uverbs*
