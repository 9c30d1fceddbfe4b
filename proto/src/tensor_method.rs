//! Declares the methods whose messages carry tensors. The build script includes this file too: it generates no
//! server for these methods, because the generated code copies every value.

/// A method of a pserver whose messages carry tensors; trainers call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMethod {
    Push,
    Pull,
    PullRows,
    ReadRange,
}

impl TensorMethod {
    const ALL: [Self; 4] = [Self::Push, Self::Pull, Self::PullRows, Self::ReadRange];

    /// Returns the path of the method's requests.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Push => "/steadfast.v1.Pserver/Push",
            Self::Pull => "/steadfast.v1.Pserver/Pull",
            Self::PullRows => "/steadfast.v1.Pserver/PullRows",
            Self::ReadRange => "/steadfast.v1.Pserver/ReadRange",
        }
    }

    /// Returns the method that is called at a path; `None` if its messages carry no tensors.
    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.path() == path)
    }
}
