#!/bin/sh
# Run a command on two nodes: network namespaces of this machine, with a cable between them and no other way
# out. For `unshare --net --pid --fork --kill-child --mount-proc`: this shell's namespace is the first node,
# and all of it is gone with the shell. The command runs on both at once, with what torchrun and gloo need to
# know; the status is the first one's that failed.
set -eu

unshare --net sleep infinity &
other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done

ip link add veth0 type veth peer name veth0 netns $other
wire() {
    "$@" ip address add "$address/24" dev veth0
    "$@" ip link set veth0 up
    "$@" ip link set lo up
}
address=10.77.0.1 wire env
address=10.77.0.2 wire nsenter --net --target $other

export GLOO_SOCKET_IFNAME=veth0
nsenter --net --target $other env PET_LOCAL_ADDR=10.77.0.2 PET_RDZV_CONF=is_host=0 "$@" &
second=$!
status=0
PET_LOCAL_ADDR=10.77.0.1 PET_RDZV_CONF=is_host=1 "$@" || status=$?
wait $second || status=$((status ? status : $?))
exit $status
