#!/bin/sh
# Disturbs the containers of a compose project, one after the other, for as long as it runs: kills processes
# as a machine does that runs out of memory, pauses them, and takes them off the network.
#
#   CHAOS_EVERY=10      seconds of peace between two disturbances
#   CHAOS_FOR=8         seconds that one of them is paused or disconnected
#   CHAOS_ROUNDS=0      how many; 0 is without end
#   CHAOS_SERVICES=…    whom it may hit
#
# It needs the engine's socket, and to see the processes of the host: it can do whatever root can. Run it
# where nothing else is of worth.
set -eu

project=${COMPOSE_PROJECT_NAME:-steadfast}
every=${CHAOS_EVERY:-10}
lasts=${CHAOS_FOR:-8}
rounds=${CHAOS_ROUNDS:-0}
services=${CHAOS_SERVICES:-master pserver trainer etcd-0 etcd-1 etcd-2}

of() { docker ps --quiet --filter "label=com.docker.compose.project=$project" --filter "label=com.docker.compose.service=$1"; }
one_of() { printf '%s\n' "$@" | shuf -n 1; }
say() { echo "chaos: $*"; }

round=0
while [ "$rounds" -eq 0 ] || [ "$round" -lt "$rounds" ]; do
	sleep "$every"
	round=$((round + 1))
	# shellcheck disable=SC2086
	service=$(one_of $services)
	container=$(of "$service" | shuf -n 1)
	if [ -z "$container" ]; then
		say "there is no $service now"
		continue
	fi
	network=$(docker inspect --format '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}' "$container" | cut -d ' ' -f 1)
	# Whoever ends meanwhile has nothing more to be disturbed in.
	case $(one_of kill pause disconnect) in
	kill)
		say "kills $service ($container)"
		# By its process: what is killed through the engine is not started again. One that ended has 0.
		process=$(docker inspect --format '{{.State.Pid}}' "$container") || continue
		[ "$process" -eq 0 ] || kill -KILL "$process" || true
		;;
	pause)
		say "pauses $service ($container) for $lasts s"
		docker pause "$container" >/dev/null || continue
		sleep "$lasts"
		docker unpause "$container" >/dev/null || true
		;;
	disconnect)
		say "disconnects $service ($container) for $lasts s"
		docker network disconnect "$network" "$container" || continue
		sleep "$lasts"
		# With another address, perhaps: members of etcd are called by their names, and ours notice.
		docker network connect --alias "$service" "$network" "$container" || true
		;;
	esac
done
