//! Faults of a world, and their one-line text form.

use std::fmt;
use std::str::FromStr;

/// Role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Master,
    Pserver,
    Trainer,
    /// The agent of a node of an elastic job.
    Agent,
    /// A worker of an agent. Workers are counted over all nodes: those of the first one come first.
    Worker,
}

impl Role {
    /// The roles of a training job, in the order in which a world starts them.
    pub const ALL: [Self; 3] = [Self::Master, Self::Pserver, Self::Trainer];

    /// The roles of an elastic job.
    pub const ELASTIC: [Self; 3] = [Self::Master, Self::Agent, Self::Worker];

    /// Returns the name of the role. That of a role of a training job is also the second half of the program name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Pserver => "pserver",
            Self::Trainer => "trainer",
            Self::Agent => "agent",
            Self::Worker => "worker",
        }
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().chain(Self::ELASTIC).find(|it| it.name() == name)
    }
}

/// Kinds of faults; a kind and its target make a [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A process is killed with SIGKILL.
    Kill,
    /// A process is stopped for longer than its lease.
    Pause,
    /// A process receives SIGTERM and drains.
    Leave,
    /// An agent of an elastic job is started that was not running.
    Join,
    /// Connections between a process and etcd are refused until its lease expires.
    Cut,
    /// Data between a process and etcd are dropped silently, both ways, until its lease expires.
    Isolate,
    /// Data from etcd to a process are dropped silently until its lease expires.
    Deafen,
    /// Data between a process and etcd are delayed, for the length of a lease.
    Slow,
    /// The connections of a process to etcd are reset once.
    Reset,
    /// Data on incoming connections of a process are dropped silently, for longer than its lease; etcd
    /// stays reachable.
    Shut,
    /// The leader of etcd is killed, and restarted once another member leads.
    EtcdKillLeader,
    /// A member of etcd is killed and restarted.
    EtcdKill,
    /// A member of etcd is stopped for longer than a lease.
    EtcdPause,
    /// Data of a process to the others are dropped silently, for longer than its lease; what they send arrives, and etcd
    /// stays reachable. Only in worlds of hosts, see [`super::Shape::hosts`].
    Mute,
    /// All members of etcd are stopped for longer than a lease; all leases expire at once.
    EtcdStall,
    /// The history of etcd is compacted.
    EtcdCompact,
    /// The leadership of etcd moves to another member.
    EtcdMoveLeader,
    /// etcd has no space left, for the length of a lease.
    EtcdFull,
    /// The store has no space left for a while.
    StoreFull,
    /// The store is unavailable for a while.
    StoreAway,
    /// Syncs of files fail for a while, in all processes but etcd.
    SyncFail,
    /// The calendar time of all processes but etcd jumps by one or two hours, forth and back.
    Clock,
    /// All processes including etcd are killed and restarted.
    KillAll,
    /// An operator chooses another number of workers of an elastic job.
    Scale,
    /// An operator changes the number of slots, to one more than at the start or back.
    Slots,
}

/// Target of a kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hits {
    Process,
    EtcdMember,
    FaultTarget,
}

impl Kind {
    /// All kinds of faults of a training job.
    pub const ALL: [Self; 22] = [
        Self::Kill,
        Self::Pause,
        Self::Leave,
        Self::Cut,
        Self::Isolate,
        Self::Deafen,
        Self::Slow,
        Self::Reset,
        Self::Shut,
        Self::EtcdKillLeader,
        Self::EtcdKill,
        Self::EtcdPause,
        Self::EtcdStall,
        Self::EtcdCompact,
        Self::EtcdMoveLeader,
        Self::EtcdFull,
        Self::StoreFull,
        Self::StoreAway,
        Self::SyncFail,
        Self::Clock,
        Self::KillAll,
        Self::Slots,
    ];

    /// The kinds of faults of an elastic job.
    pub const ELASTIC: [Self; 10] = [
        Self::Kill,
        Self::Pause,
        Self::Leave,
        Self::Join,
        Self::Cut,
        Self::EtcdKillLeader,
        Self::EtcdPause,
        Self::EtcdStall,
        Self::EtcdMoveLeader,
        Self::Scale,
    ];

    pub fn named(name: &str) -> Option<Self> {
        let all = Self::ALL.into_iter().chain(Self::ELASTIC).chain([Self::Mute]);
        all.into_iter().find(|it| it.name() == name)
    }

    /// Returns the name of the kind in a schedule.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Leave => "leave",
            Self::Join => "join",
            Self::Cut => "cut",
            Self::Isolate => "isolate",
            Self::Deafen => "deafen",
            Self::Slow => "slow",
            Self::Reset => "reset",
            Self::Shut => "shut",
            Self::EtcdKillLeader => "etcd-kill-leader",
            Self::EtcdKill => "etcd-kill",
            Self::EtcdPause => "etcd-pause",
            Self::EtcdStall => "etcd-stall",
            Self::EtcdCompact => "etcd-compact",
            Self::EtcdMoveLeader => "etcd-move-leader",
            Self::EtcdFull => "etcd-full",
            Self::StoreFull => "store-full",
            Self::StoreAway => "store-away",
            Self::SyncFail => "sync-fail",
            Self::Clock => "clock",
            Self::KillAll => "kill-all",
            Self::Scale => "scale",
            Self::Slots => "slots",
            Self::Mute => "mute",
        }
    }

    fn hits(self) -> Hits {
        match self {
            Self::Kill
            | Self::Pause
            | Self::Leave
            | Self::Join
            | Self::Cut
            | Self::Isolate
            | Self::Deafen
            | Self::Slow
            | Self::Reset
            | Self::Shut
            | Self::Mute => Hits::Process,
            Self::EtcdKill | Self::EtcdPause => Hits::EtcdMember,
            Self::EtcdKillLeader
            | Self::EtcdStall
            | Self::EtcdCompact
            | Self::EtcdMoveLeader
            | Self::EtcdFull
            | Self::StoreFull
            | Self::StoreAway
            | Self::SyncFail
            | Self::Clock
            | Self::KillAll
            | Self::Scale
            | Self::Slots => Hits::FaultTarget,
        }
    }

    /// Returns whether the target is one process of the job.
    pub fn hits_a_process(self) -> bool {
        self.hits() == Hits::Process
    }

    /// Returns whether the target is one member of etcd.
    pub fn hits_an_etcd_member(self) -> bool {
        self.hits() == Hits::EtcdMember
    }
}

/// One fault. The constructors check that the target matches the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// Role of the target, for faults of a process.
    pub role: Option<Role>,
    /// Index of the process within its role, or of the etcd member.
    pub index: u32,
}

impl Fault {
    /// Creates a fault of one process.
    pub fn of(kind: Kind, role: Role, index: u32) -> Self {
        assert!(kind.hits_a_process(), "{} hits no process", kind.name());
        Self { kind, role: Some(role), index }
    }

    /// Creates a fault of one member of etcd.
    pub fn of_etcd(kind: Kind, index: u32) -> Self {
        assert!(kind.hits_an_etcd_member(), "{} hits no member of etcd", kind.name());
        Self { kind, role: None, index }
    }

    /// Creates a fault of the whole world.
    pub fn of_all(kind: Kind) -> Self {
        assert!(kind.hits() == Hits::FaultTarget, "{} does not hit all", kind.name());
        Self { kind, role: None, index: 0 }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.kind.name();
        match (self.role, self.kind.hits()) {
            (Some(role), _) => write!(f, "{name} {} {}", role.name(), self.index),
            (None, Hits::EtcdMember) => write!(f, "{name} {}", self.index),
            (None, Hits::Process | Hits::FaultTarget) => f.write_str(name),
        }
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let wrong = || format!("cannot parse the fault `{text}`");
        let (name, rest) = words.split_first().ok_or_else(wrong)?;
        let kind = Kind::named(name).ok_or_else(wrong)?;
        let number = |it: &str| it.parse::<u32>().map_err(|_| wrong());
        match (kind.hits(), rest) {
            (Hits::Process, [role, index]) => {
                let role = Role::named(role).ok_or_else(wrong)?;
                Ok(Self::of(kind, role, number(index)?))
            }
            (Hits::EtcdMember, [index]) => Ok(Self::of_etcd(kind, number(index)?)),
            (Hits::FaultTarget, []) => Ok(Self::of_all(kind)),
            (Hits::Process | Hits::EtcdMember | Hits::FaultTarget, _) => Err(wrong()),
        }
    }
}
