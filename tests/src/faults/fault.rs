//! What can go wrong in a world, and its one-line text.

use std::fmt;
use std::str::FromStr;

/// What a process is to the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Master,
    Pserver,
    Trainer,
}

impl Role {
    /// All roles, in the order in which a world starts them.
    pub const ALL: [Self; 3] = [Self::Master, Self::Pserver, Self::Trainer];

    /// Its name, which is also the second half of its program's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Pserver => "pserver",
            Self::Trainer => "trainer",
        }
    }
}

/// Kinds of faults; together with whom it hits, a kind is a [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A process is killed without a word.
    Kill,
    /// A process is stopped for longer than its lease.
    Pause,
    /// A process is told to leave in good order.
    Leave,
    /// A process cannot connect to etcd until its lease is over.
    Cut,
    /// A process and etcd do not hear each other until its lease is over, and are not told.
    Isolate,
    /// etcd hears a process until its lease is over, and the process does not hear etcd.
    Deafen,
    /// Each piece between a process and etcd comes late, for as long as a lease.
    Slow,
    /// The connections of a process to etcd are reset once.
    Reset,
    /// A process hears nobody but etcd, and nobody hears it, for longer than its lease.
    Shut,
    /// The member of etcd that leads is killed, and started again once another one leads.
    EtcdKillLeader,
    /// A member of etcd is killed and started again.
    EtcdKill,
    /// A member of etcd is stopped for longer than a lease.
    EtcdPause,
    /// All members of etcd are stopped for longer than a lease, so that all leases end at once.
    EtcdStall,
    /// The history of etcd is dropped.
    EtcdCompact,
    /// Another member of etcd leads.
    EtcdMoveLeader,
    /// etcd takes no more for as long as a lease.
    EtcdFull,
    /// The store has no space left for a while.
    StoreFull,
    /// The store is not there for a while.
    StoreAway,
    /// Everything is killed, etcd included, and started again.
    KillAll,
}

/// Whom a kind of fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hits {
    Process,
    EtcdMember,
    World,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 19] = [
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
        Self::KillAll,
    ];

    /// Its name in a schedule.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Leave => "leave",
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
            Self::KillAll => "kill-all",
        }
    }

    fn hits(self) -> Hits {
        match self {
            Self::Kill
            | Self::Pause
            | Self::Leave
            | Self::Cut
            | Self::Isolate
            | Self::Deafen
            | Self::Slow
            | Self::Reset
            | Self::Shut => Hits::Process,
            Self::EtcdKill | Self::EtcdPause => Hits::EtcdMember,
            Self::EtcdKillLeader
            | Self::EtcdStall
            | Self::EtcdCompact
            | Self::EtcdMoveLeader
            | Self::EtcdFull
            | Self::StoreFull
            | Self::StoreAway
            | Self::KillAll => Hits::World,
        }
    }

    /// Whether it hits one process of the job.
    pub fn hits_a_process(self) -> bool {
        self.hits() == Hits::Process
    }

    /// Whether it hits one member of etcd.
    pub fn hits_an_etcd_member(self) -> bool {
        self.hits() == Hits::EtcdMember
    }
}

/// One fault. Whether its fields fit its kind is checked when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// The role that is hit, for kinds that hit a process.
    pub role: Option<Role>,
    /// Which process of the role, or which member of etcd.
    pub index: u32,
}

impl Fault {
    /// A fault of one process.
    pub fn of(kind: Kind, role: Role, index: u32) -> Self {
        assert!(kind.hits_a_process(), "{} hits no process", kind.name());
        Self { kind, role: Some(role), index }
    }

    /// A fault of one member of etcd.
    pub fn of_etcd(kind: Kind, index: u32) -> Self {
        assert!(kind.hits_an_etcd_member(), "{} hits no member of etcd", kind.name());
        Self { kind, role: None, index }
    }

    /// A fault of the whole world.
    pub fn of_all(kind: Kind) -> Self {
        assert!(kind.hits() == Hits::World, "{} does not hit all", kind.name());
        Self { kind, role: None, index: 0 }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.kind.name();
        match (self.role, self.kind.hits()) {
            (Some(role), _) => write!(f, "{name} {} {}", role.name(), self.index),
            (None, Hits::EtcdMember) => write!(f, "{name} {}", self.index),
            (None, Hits::Process | Hits::World) => f.write_str(name),
        }
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let wrong = || format!("`{text}` is no fault");
        let (name, rest) = words.split_first().ok_or_else(wrong)?;
        let kind = Kind::ALL.into_iter().find(|it| it.name() == *name).ok_or_else(wrong)?;
        let number = |it: &str| it.parse::<u32>().map_err(|_| wrong());
        match (kind.hits(), rest) {
            (Hits::Process, [role, index]) => {
                let role = Role::ALL.into_iter().find(|it| it.name() == *role).ok_or_else(wrong)?;
                Ok(Self::of(kind, role, number(index)?))
            }
            (Hits::EtcdMember, [index]) => Ok(Self::of_etcd(kind, number(index)?)),
            (Hits::World, []) => Ok(Self::of_all(kind)),
            (Hits::Process | Hits::EtcdMember | Hits::World, _) => Err(wrong()),
        }
    }
}
