//! Validation of requests without access to the store.

use super::refusal::Refusal;
use super::{overlap, range, txn, write};
use etcd_client::proto::{PbDeleteRequest, PbPutRequest, PbRangeRequest, PbTxnRequest};
use std::ops::Deref;

/// Maximum of operations and of compares in one transaction: real etcd's `--max-txn-ops`.
const OPERATIONS_MAX: usize = 128;

/// A request that can be validated without the store.
pub trait Validate {
    fn check(&self) -> Result<(), Refusal>;
}

/// A validated request. The core accepts no other; the validation runs outside of the core's lock.
#[derive(Debug)]
pub struct Checked<R>(R);

impl<R: Validate> Checked<R> {
    pub fn new(request: R) -> Result<Self, Refusal> {
        request.check()?;
        Ok(Checked(request))
    }
}

impl<R> Deref for Checked<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.0
    }
}

impl Validate for PbRangeRequest {
    fn check(&self) -> Result<(), Refusal> {
        range::check(self)
    }
}

impl Validate for PbPutRequest {
    fn check(&self) -> Result<(), Refusal> {
        write::check_put(self)
    }
}

impl Validate for PbDeleteRequest {
    fn check(&self) -> Result<(), Refusal> {
        write::check_delete(self)
    }
}

impl Validate for PbTxnRequest {
    fn check(&self) -> Result<(), Refusal> {
        txn::check(self, OPERATIONS_MAX)?;
        overlap::check(self)
    }
}
