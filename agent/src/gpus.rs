//! Counts the GPUs that a process may use: the machine or container has them, and no variable hides them.

use std::fs;
use std::path::{Path, PathBuf};

/// Nvidia's driver numbers its devices up to this.
const NVIDIA_DEVICES_MAX: u32 = 64;

/// The GPUs that this process can open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Machine {
    nvidia: u32,
    /// Lists the GPUs that are divided into MIG instances.
    nvidia_divided: u32,
    amd: u32,
}

/// Returns the number of GPUs that a program of this process may use.
pub(crate) fn count() -> u32 {
    visible(Machine::own(), |name| std::env::var(name).ok())
}

/// Returns how many of the machine's GPUs the environment variables leave visible.
fn visible(machine: Machine, variable: impl Fn(&str) -> Option<String>) -> u32 {
    let cuda = variable("CUDA_VISIBLE_DEVICES");
    if 0 < machine.nvidia {
        let whole = machine.nvidia - machine.nvidia_divided;
        return match cuda {
            Some(list) => listed(&list, machine.nvidia),
            // A process sees one instance of a divided GPU.
            None => whole.max(1),
        };
    }
    let of_runtime = variable("ROCR_VISIBLE_DEVICES");
    let left = of_runtime.map_or(machine.amd, |list| listed(&list, machine.amd));
    // The indexes of the second list count those that the first one leaves.
    variable("HIP_VISIBLE_DEVICES").or(cuda).map_or(left, |list| listed(&list, left))
}

/// Returns how many of `devices` devices a list names, by index or by id. The list ends at the first entry that names
/// no device, and an index that occurs twice makes it invalid as a whole.
fn listed(list: &str, devices: u32) -> u32 {
    let mut seen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        if entry.starts_with("MIG-") {
            // However many are listed, a process sees one.
            return 1.max(seen.len() as u32);
        }
        let is_known = match entry.parse::<u32>() {
            Ok(index) => index < devices,
            Err(_) => entry.starts_with("GPU-"),
        };
        if !is_known {
            break;
        }
        if seen.contains(&entry) {
            return 0;
        }
        seen.push(entry);
    }
    (seen.len() as u32).min(devices)
}

impl Machine {
    fn own() -> Self {
        let exists = |path: &str| Path::new(path).exists();
        let nvidia = (0..NVIDIA_DEVICES_MAX).filter(|it| exists(&format!("/dev/nvidia{it}")));
        let divided = |it: &u32| {
            let instances = format!("/proc/driver/nvidia/capabilities/gpu{it}/mig");
            entries(Path::new(&instances)).any(|path| name(&path).starts_with("gi"))
        };
        let nvidia: Vec<u32> = nvidia.collect();
        let nodes = entries(Path::new("/sys/class/kfd/kfd/topology/nodes"));
        let amd = nodes.filter(|node| {
            let properties = fs::read_to_string(node.join("properties")).unwrap_or_default();
            let minor = properties.lines().find_map(|it| it.strip_prefix("drm_render_minor "));
            // That of a processor is 0.
            let minor = minor.and_then(|it| it.trim().parse::<u32>().ok()).filter(|it| *it != 0);
            minor.is_some_and(|minor| exists(&format!("/dev/dri/renderD{minor}")))
        });
        let amd = if exists("/dev/kfd") { amd.count() as u32 } else { 0 };
        let nvidia_divided = nvidia.iter().filter(|it| divided(it)).count() as u32;
        Self { nvidia: nvidia.len() as u32, nvidia_divided, amd }
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(machine: Machine, variables: &[(&str, &str)], expected: u32) {
        let variable = |name: &str| {
            let found = variables.iter().find(|(it, _)| *it == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        assert_eq!(visible(machine, variable), expected, "{machine:?} {variables:?}");
    }

    /// S003-20: `--nproc-per-node gpu` is the number that PyTorch counts in a worker.
    #[test]
    fn a_worker_is_counted_for_each_gpu_that_the_process_may_see() {
        let nvidia = Machine { nvidia: 4, ..Machine::default() };
        check(nvidia, &[], 4);
        for (list, expected) in [
            ("", 0),
            ("-1", 0),
            ("NoDevFiles", 0),
            ("0", 1),
            ("3, 1", 2),
            ("0,1,-1,2", 2),
            ("0,4,1", 1),
            ("1,1", 0),
            ("GPU-8932f937-d72c,GPU-1a2b", 2),
            ("MIG-GPU-8932f937/1/0", 1),
            ("MIG-1,MIG-2", 1),
        ] {
            check(nvidia, &[("CUDA_VISIBLE_DEVICES", list)], expected);
        }
        check(Machine { nvidia: 0, ..nvidia }, &[("CUDA_VISIBLE_DEVICES", "0,1")], 0);
    }

    #[test]
    fn a_process_sees_one_instance_of_divided_gpus() {
        let divided = |nvidia_divided| Machine { nvidia: 4, nvidia_divided, amd: 0 };
        check(divided(4), &[], 1);
        check(divided(1), &[], 3);
    }

    #[test]
    fn the_variables_of_rocm_hide_gpus_one_after_the_other() {
        let amd = Machine { amd: 8, ..Machine::default() };
        check(amd, &[], 8);
        check(amd, &[("ROCR_VISIBLE_DEVICES", "4,5,6,7")], 4);
        check(amd, &[("ROCR_VISIBLE_DEVICES", "4,5"), ("HIP_VISIBLE_DEVICES", "1")], 1);
        check(amd, &[("ROCR_VISIBLE_DEVICES", "4,5"), ("HIP_VISIBLE_DEVICES", "4")], 0);
        check(amd, &[("HIP_VISIBLE_DEVICES", "")], 0);
        check(amd, &[("HIP_VISIBLE_DEVICES", "0"), ("CUDA_VISIBLE_DEVICES", "0,1")], 1);
        check(amd, &[("CUDA_VISIBLE_DEVICES", "0,1")], 2);
    }
}
