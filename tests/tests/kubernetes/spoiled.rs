//! Deliberately invalid manifests, to verify that each check can fail.

use serde_json::Value;

use crate::manifests::Overlay;
use crate::{Check, disruption, network, pods, references, settings};

const CHECKS: [(&str, Check); 13] = [
    ("selectors", references::selectors),
    ("ports", references::ports),
    ("volumes", references::volumes),
    ("keys", references::keys),
    ("accepted", settings::accepted),
    ("bound", settings::ports_are_those_of_the_manifest),
    ("job", settings::job),
    ("restricted", pods::restricted),
    ("probes", pods::probes),
    ("grace", pods::grace),
    ("budgets", disruption::budgets),
    ("rollouts", disruption::rollouts),
    ("ways", network::ways),
];

/// One line per case: the check, the object, the JSON pointer, the new value (null removes it), and a
/// part of the expected error. `full` expands `LABELS`, `POD` and `C`.
const SPOILED: &str = r#"
selectors | Deployment steadfast-master | /spec/selector/LABELS | "x" | not only its own pods
selectors | StatefulSet steadfast-pserver | /spec/selector/LABELS | "master" | not only its own pods
selectors | Service steadfast-master | /spec/selector/app.kubernetes.io~1component | "x" | selects no pod
selectors | PodDisruptionBudget steadfast-trainer | /spec/selector/LABELS | "x" | selects no pod
selectors | NetworkPolicy steadfast-trainer | /spec/podSelector/LABELS | "x" | selects no pod
selectors | StatefulSet steadfast-pserver | /spec/serviceName | "x" | is not a headless Service
selectors | StatefulSet etcd | /spec/serviceName | "steadfast-master" | is not a headless Service
selectors | HorizontalPodAutoscaler steadfast-trainer | /spec/scaleTargetRef/name | "x" | has no scale target
ports | Service steadfast-master | /spec/ports/0/targetPort | "x" | has no port x
ports | Service steadfast-pserver | /spec/ports/0/port | 7001 | has no port grpc
ports | Deployment steadfast-trainer | C/readinessProbe/httpGet/port | 9101 | unknown port 9101
volumes | Deployment steadfast-master | POD/volumes/0/name | "x" | : volume
volumes | Deployment steadfast-master | C/volumeMounts/0/name | "x" | no container mounts
volumes | Deployment steadfast-master | POD/volumes/0/secret/secretName | "x" | Secret x is missing
volumes | Deployment steadfast-master | C/envFrom/0/configMapRef/name | "x" | ConfigMap x is missing
volumes | Deployment steadfast-master | C/volumeMounts/0/mountPath | "/x" | is in no volume
volumes | Deployment steadfast-master | POD/serviceAccountName | "x" | ServiceAccount x is missing
volumes | ConfigMap steadfast-master-settings | /data/STEADFAST_JOB_FILE | "/run/steadfast/job/x" | has no file x
volumes | Secret steadfast-etcd-tls | /data/ca.crt | null | has no file ca.crt
keys | Deployment steadfast-trainer | C/env | [] | steadfast-trainer has no keys
accepted | Deployment steadfast-trainer | C/args/0 | "--ad=1" | --ad
accepted | Deployment steadfast-trainer | C/args/0 | "--admin-listen=0.0.0.0" | --admin-listen
accepted | ConfigMap steadfast-settings | /data/STEADFAST_ETCD_ENDPOINTS | "etcd" | etcd
accepted | ConfigMap steadfast-settings | /data/STEADFAST_JOBS | "x" | STEADFAST_JOBS is not a setting
accepted | ConfigMap steadfast-settings | /data/STEADFAST_PSERVERS | "3" | STEADFAST_PSERVERS is not a setting
accepted | ConfigMap steadfast-settings | /data/OTHER | "x" | unknown variable OTHER
accepted | StatefulSet etcd | C/command/1 | "--nam=x" | nam
bound | StatefulSet steadfast-pserver | C/ports/0/containerPort | 7001 | port grpc is 7001
bound | Deployment steadfast-trainer | C/args/0 | "--admin-listen=0.0.0.0:9101" | binds 0.0.0.0:9101
job | ConfigMap steadfast-settings | /data/STEADFAST_JOB | "x" | the name of the job is digits
job | ConfigMap steadfast-job | /data/job.toml | "x = 1" | job.toml
job | ConfigMap steadfast-master-settings | /data/STEADFAST_PSERVERS | "4" | 4 slots
restricted | Deployment steadfast-trainer | POD/automountServiceAccountToken | true | a token
restricted | ServiceAccount steadfast | /automountServiceAccountToken | null | a token
restricted | Deployment steadfast-trainer | POD/hostNetwork | true | hostNetwork
restricted | Deployment steadfast-trainer | POD/enableServiceLinks | true | enableServiceLinks
restricted | Deployment steadfast-trainer | POD/securityContext/runAsNonRoot | false | runAsNonRoot
restricted | Deployment steadfast-trainer | POD/securityContext/runAsUser | 0 | runAsUser
restricted | Deployment steadfast-trainer | POD/securityContext/fsGroup | null | fsGroup
restricted | Deployment steadfast-trainer | POD/securityContext/seccompProfile/type | "Unconfined" | seccomp
restricted | Deployment steadfast-trainer | C/securityContext/allowPrivilegeEscalation | null | allowPrivilegeEscalation
restricted | Deployment steadfast-trainer | C/securityContext/readOnlyRootFilesystem | false | readOnlyRootFilesystem
restricted | Deployment steadfast-trainer | C/securityContext/capabilities/drop | [] | capabilities
restricted | Deployment steadfast-trainer | C/resources/limits/memory | null | no memory in limits
restricted | Deployment steadfast-trainer | POD/volumes/0/secret/defaultMode | 420 | readable for all users
probes | Deployment steadfast-trainer | C/livenessProbe/httpGet/path | "/readyz" | livenessProbe
probes | Deployment steadfast-trainer | C/startupProbe/httpGet/scheme | "HTTP" | startupProbe
probes | Deployment steadfast-trainer | C/readinessProbe | {"grpc": {"port": 7000}} | readinessProbe
probes | Deployment steadfast-trainer | C/startupProbe/failureThreshold | 3 | less than a minute
probes | StatefulSet etcd | C/livenessProbe/httpGet/path | "/readyz" | livenessProbe
grace | StatefulSet steadfast-pserver | POD/terminationGracePeriodSeconds | 60 | a drain of 90 s
grace | Deployment steadfast-master | C/lifecycle/preStop/sleep/seconds | 50 | a drain of 80 s
budgets | PodDisruptionBudget steadfast-pserver | /spec/maxUnavailable | 0 | no node can be drained
budgets | PodDisruptionBudget steadfast-pserver | /spec/maxUnavailable | 2 | 2 slots or members
budgets | PodDisruptionBudget steadfast-pserver | /spec/selector/LABELS | "x" | pserver has no budget
budgets | PodDisruptionBudget steadfast-pserver | /spec/selector/LABELS | "master" | the acting master
budgets | PodDisruptionBudget steadfast-trainer | /spec/unhealthyPodEvictionPolicy | null | AlwaysAllow
rollouts | Deployment steadfast-master | /spec/strategy/rollingUpdate/maxUnavailable | 1 | never end
rollouts | Deployment steadfast-master | /spec/strategy/rollingUpdate/maxSurge | 0 | before its successor
rollouts | Deployment steadfast-master | C/lifecycle | null | before its successor
rollouts | Deployment steadfast-master | /spec/progressDeadlineSeconds | 600 | count as a failure
rollouts | StatefulSet steadfast-pserver | /spec/replicas | 4 | never end
rollouts | StatefulSet steadfast-pserver | /spec/podManagementPolicy | "OrderedReady" | not Parallel
rollouts | Deployment steadfast-trainer | /spec/replicas | 2 | left to the autoscaler
rollouts | Deployment steadfast-trainer | C/resources/requests/cpu | null | requires a resource request
ways | NetworkPolicy steadfast-trainer | /spec/egress/0/ports/0/port | 7001 | trainer cannot reach master at 7000
ways | NetworkPolicy steadfast-pserver | /spec/ingress/0/from/0 | {"namespaceSelector": {}} | stranger can reach pserver
ways | NetworkPolicy steadfast-nothing-else | /spec/policyTypes | ["Egress"] | can reach tools at
ways | NetworkPolicy steadfast-names | /spec/egress/0/ports/0/protocol | "TCP" | cannot reach names at 53
ways | NetworkPolicy steadfast-store | /spec/egress/0/ports | null | can reach 169.254.169.254 at 80
"#;

/// Returns the cases that were not reported as expected.
pub fn silent(overlay: &Overlay) -> Vec<String> {
    let mut silent = Vec::new();
    for line in SPOILED.trim().lines() {
        let parts: Vec<&str> = line.split(" | ").collect();
        let [check, object, place, value, words] = parts[..] else { panic!("a line: {line}") };
        let (_, check) = CHECKS.iter().find(|it| it.0 == check).expect("a check of this name");
        let (kind, name) = object.split_once(' ').expect("a kind and a name");
        let value: Value = serde_json::from_str(value).expect("a JSON value");
        let errors = check(&overlay.with((kind, name), &full(place), value)).join("\n");
        if !errors.contains(words) {
            silent.push(format!("{line}\n    reported: {errors}"));
        }
    }
    silent
}

fn full(place: &str) -> String {
    let place = place.replace("LABELS", "matchLabels/app.kubernetes.io~1component");
    if let Some(rest) = place.strip_prefix("C/") {
        return format!("/spec/template/spec/containers/0/{rest}");
    }
    match place.strip_prefix("POD/") {
        Some(rest) => format!("/spec/template/spec/{rest}"),
        None => place,
    }
}
