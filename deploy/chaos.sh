#!/bin/sh
# Injects faults into the containers of a compose project, one at a time: kills processes (like the OOM
# killer), pauses containers, and disconnects them from the network.
#
#   CHAOS_EVERY=10      seconds between two faults
#   CHAOS_FOR=8         seconds that a container is paused or disconnected
#   CHAOS_ROUNDS=0      number of faults; 0: no limit
#   CHAOS_SERVICES=…    services to inject faults into
#
# It needs the engine's socket and the process namespace of the host, which is equivalent to root access. Run
# it only on machines without valuable data.
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
		say "no container of $service is running"
		continue
	fi
	network=$(docker inspect --format '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}' "$container" | cut -d ' ' -f 1)
	# A container may exit at any time, so errors of docker are ignored.
	case $(one_of kill pause disconnect) in
	kill)
		say "killing $service ($container)"
		# Not `docker kill`: the engine does not restart a container that it killed. Exited ones have pid 0.
		process=$(docker inspect --format '{{.State.Pid}}' "$container") || continue
		[ "$process" -eq 0 ] || kill -KILL "$process" || true
		;;
	pause)
		say "pausing $service ($container) for $lasts s"
		docker pause "$container" >/dev/null || continue
		sleep "$lasts"
		docker unpause "$container" >/dev/null || true
		;;
	disconnect)
		say "disconnecting $service ($container) for $lasts s"
		docker network disconnect "$network" "$container" || continue
		sleep "$lasts"
		# The address may change: members of etcd are reached by name, and Steadfast processes notice the change.
		docker network connect --alias "$service" "$network" "$container" || true
		;;
	esac
done
