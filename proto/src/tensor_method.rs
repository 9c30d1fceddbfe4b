//! Declares the methods whose messages carry tensors. The build script includes this file too: it generates no
//! server for these methods, because the generated code copies every value.

/// A method of a pserver whose messages carry tensors; trainers call it, or other pservers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMethod {
    Push,
    Pull,
    PullRows,
    ReadRange,
    FollowSlot,
    FollowStep,
    ReadHandover,
}

impl TensorMethod {
    const ALL: [Self; 7] = [
        Self::Push,
        Self::Pull,
        Self::PullRows,
        Self::ReadRange,
        Self::FollowSlot,
        Self::FollowStep,
        Self::ReadHandover,
    ];

    /// Returns the path of the method's requests.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Push => "/steadfast.v1.Pserver/Push",
            Self::Pull => "/steadfast.v1.Pserver/Pull",
            Self::PullRows => "/steadfast.v1.Pserver/PullRows",
            Self::ReadRange => "/steadfast.v1.Pserver/ReadRange",
            Self::FollowSlot => "/steadfast.v1.Pserver/FollowSlot",
            Self::FollowStep => "/steadfast.v1.Pserver/FollowStep",
            Self::ReadHandover => "/steadfast.v1.Pserver/ReadHandover",
        }
    }

    /// Returns the method that is called at a path; `None` if its messages carry no tensors.
    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.path() == path)
    }
}
