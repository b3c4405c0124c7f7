# `bash pre_stop.sh PORT SECONDS`: waits until no connection to PORT is open of this pod, at most SECONDS, then stops Ray.
# Kubernetes runs it when it takes a pod away; rayservice.yaml says so.
port=$(printf '%04X' "$1")
for ((waited = 0; waited < $2; waited++)); do
  # Local address, any peer, state 01: established.
  grep -qsE "^ *[0-9]+: [0-9A-F]+:$port [0-9A-F]+:[0-9A-F]+ 01 " /proc/net/tcp /proc/net/tcp6 || break
  sleep 1
done
ray stop
