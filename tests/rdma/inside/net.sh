# Sourced by init: RDMA devices over the network that $GUEST_NET names. As few programs as will do.
# Full paths where busybox has a lesser applet of that name.

modules() {
  /sbin/modprobe -a ib_uverbs rdma_ucm rdma_rxe veth dummy sch_netem || return
  chmod 666 /dev/infiniband/rdma_cm
}

ready() { # wait until the device has a RoCE GID with the address: $1 device, $2 address
  wanted=$(printf 'ffff:%02x%02x:%02x%02x' ${2//./ })
  for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
    for gid in 0 1 2 3 4 5 6 7; do
      read -r found < "/sys/class/infiniband/$1/ports/1/gids/$gid"
      case $found in *$wanted) return 0 ;; esac
    done
    sleep 0.1
  done
  echo "device $1 has no GID for $2"
  return 1
}

up() { # $1 netdev, $2 address: what ip is to do
  printf 'link set lo up\nlink set %s mtu 4200 up\naddr add %s/24 dev %s\n' "$1" "$2" "$1"
}

case $GUEST_NET in
  pair)
    modules && rdma system set netns shared &&
      printf '%s\n' 'netns add host' 'netns add dpu' 'link set lo up' \
        'link add veth_host netns host type veth peer name veth_dpu netns dpu' | /bin/ip -batch - &&
      up veth_host 10.7.0.1 | /bin/ip -n host -batch - &&
      up veth_dpu 10.7.0.2 | /bin/ip -n dpu -batch - &&
      /bin/ip netns exec host rdma link add rxe_host type rxe netdev veth_host &&
      /bin/ip netns exec dpu rdma link add rxe_dpu type rxe netdev veth_dpu &&
      ready rxe_host 10.7.0.1 && ready rxe_dpu 10.7.0.2 || return 1
    export ENTRESOL_RDMA_DEVICE=rxe_host,rxe_dpu
    ;;
  loopback)
    modules && { echo 'link add link0 type dummy'; up link0 10.8.0.1; } | /bin/ip -batch - &&
      rdma link add rxe0 type rxe netdev link0 && ready rxe0 10.8.0.1 || return 1
    export ENTRESOL_RDMA_DEVICE=rxe0
    ;;
  wire) # one end of a wire between two machines
    modules && up eth0 "$GUEST_ADDRESS" | /bin/ip -batch - &&
      rdma link add rxe0 type rxe netdev eth0 && ready rxe0 "$GUEST_ADDRESS" || return 1
    export ENTRESOL_RDMA_DEVICE=rxe0 ENTRESOL_RDMA_ADDRESS=$GUEST_ADDRESS ENTRESOL_RDMA_PEER=$GUEST_PEER
    ;;
  none)
    /bin/ip link set lo up
    return 0
    ;;
esac
chmod 666 /dev/infiniband/uverbs*
