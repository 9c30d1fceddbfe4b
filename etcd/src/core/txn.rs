//! The Txn request: compares first, then the operations of one branch, all at one revision.
//!
//! Every compare, including nested ones, sees the store before the transaction; the operations see each
//! other. So a transaction is first turned into a [`Plan`] with the selected branches, which is then
//! checked and run.

use super::compare;
use super::history::History;
use super::refusal::Refusal;
use super::reply;
use super::staged::Staged;
use super::{range, write};
use etcd_client::proto::{
    PbDeleteRequest, PbPutRequest, PbRangeRequest, PbResponseHeader, PbResponseOp, PbTxnOpRequest,
    PbTxnOpResponse, PbTxnRequest, PbTxnRequestOp, PbTxnResponse,
};

/// A transaction with its selected branches.
pub struct Plan<'r> {
    succeeded: bool,
    steps: Vec<Step<'r>>,
}

enum Step<'r> {
    Range(&'r PbRangeRequest),
    Put(&'r PbPutRequest),
    Delete(&'r PbDeleteRequest),
    Txn(Plan<'r>),
}

/// Validates a transaction and its parts. The limit of operations shrinks with every level of nesting.
pub fn check(request: &PbTxnRequest, operations_max: usize) -> Result<(), Refusal> {
    let longest = request.compare.len().max(request.success.len()).max(request.failure.len());
    let Some(left) = operations_max.checked_sub(longest) else {
        return Err(Refusal::TooManyOperations);
    };
    if request.compare.iter().any(|compare| compare.key.is_empty()) {
        return Err(Refusal::EmptyKey);
    }
    for operation in request.success.iter().chain(&request.failure) {
        match &operation.request {
            Some(PbTxnOpRequest::RequestRange(r)) => range::check(r)?,
            Some(PbTxnOpRequest::RequestPut(r)) => write::check_put(r)?,
            Some(PbTxnOpRequest::RequestDeleteRange(r)) => write::check_delete(r)?,
            Some(PbTxnOpRequest::RequestTxn(r)) => check(r, left)?,
            None => return Err(Refusal::KeyNotFound),
        }
    }
    Ok(())
}

/// Returns whether a transaction is read-only; like real etcd, a nested transaction counts as a write.
pub fn is_read_only(request: &PbTxnRequest) -> bool {
    let mut operations = request.success.iter().chain(&request.failure);
    operations.all(|o| matches!(o.request, Some(PbTxnOpRequest::RequestRange(_))))
}

/// Selects the branches by evaluating the compares.
pub fn plan<'r>(history: &History, request: &'r PbTxnRequest) -> Plan<'r> {
    let succeeded = request.compare.iter().all(|c| compare::holds(history, c));
    let branch = if succeeded { &request.success } else { &request.failure };
    let steps = branch.iter().filter_map(|operation| step(history, operation)).collect();
    Plan { succeeded, steps }
}

fn step<'r>(history: &History, operation: &'r PbTxnRequestOp) -> Option<Step<'r>> {
    Some(match operation.request.as_ref()? {
        PbTxnOpRequest::RequestRange(r) => Step::Range(r),
        PbTxnOpRequest::RequestPut(r) => Step::Put(r),
        PbTxnOpRequest::RequestDeleteRange(r) => Step::Delete(r),
        PbTxnOpRequest::RequestTxn(r) => Step::Txn(plan(history, r)),
    })
}

impl<'r> Plan<'r> {
    /// Returns the puts that will run, in order.
    pub fn puts(&self) -> Vec<&'r PbPutRequest> {
        self.collect(&|step| match step {
            Step::Put(request) => Some(*request),
            Step::Range(_) | Step::Delete(_) | Step::Txn(_) => None,
        })
    }

    /// Returns the reads that will run, in order.
    pub fn ranges(&self) -> Vec<&'r PbRangeRequest> {
        self.collect(&|step| match step {
            Step::Range(request) => Some(*request),
            Step::Put(_) | Step::Delete(_) | Step::Txn(_) => None,
        })
    }

    fn collect<T>(&self, pick: &impl Fn(&Step<'r>) -> Option<T>) -> Vec<T> {
        let mut found = Vec::new();
        for step in &self.steps {
            match step {
                Step::Txn(nested) => found.extend(nested.collect(pick)),
                Step::Range(_) | Step::Put(_) | Step::Delete(_) => found.extend(pick(step)),
            }
        }
        found
    }

    /// Runs the selected operations; the caller sets the header.
    pub fn run(&self, staged: &mut Staged<'_>) -> Result<PbTxnResponse, Refusal> {
        let mut responses = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let response = match step {
                Step::Range(r) => PbTxnOpResponse::ResponseRange(range::read(staged, r)),
                Step::Put(r) => PbTxnOpResponse::ResponsePut(write::put(staged, r)?),
                Step::Delete(r) => PbTxnOpResponse::ResponseDeleteRange(write::delete(staged, r)),
                Step::Txn(nested) => PbTxnOpResponse::ResponseTxn(nested.run(staged)?),
            };
            responses.push(PbResponseOp { response: Some(response) });
        }
        // Real etcd leaves the header of a nested transaction empty but present.
        let header: Option<PbResponseHeader> = Some(reply::inner_header(0));
        Ok(PbTxnResponse { header, succeeded: self.succeeded, responses })
    }
}
