//! Decides requests, and answers them after the commit.

use std::sync::Arc;

use steadfast_common::ids::{Phase, Round};
use steadfast_common::machine::{Decision, Moment};
use steadfast_common::records::rendezvous::AgentRecord;
use steadfast_common::records::scale::ScaleRecord;
use steadfast_master_core::rendezvous::{
    BarrierId, Caller, DealTerms, Directive, EndedBy, Fact, Held, Outcome,
};

use super::handle::{Change, ElasticError, Event, Known, Passage, Reply, Shared, ShutDown};
use super::machine::ElasticJob;

/// Whether a request was accepted.
type Decided = Result<(), ElasticError>;

/// An answer that is computed from the state after the commit.
pub(super) enum Answer {
    Done {
        decided: Decided,
        reply: Reply<()>,
    },
    Directive {
        decided: Decided,
        caller: Caller,
        known: Round,
        reply: Reply<Directive>,
    },
    Change {
        caller: Caller,
        known: Round,
        reply: Reply<Change>,
    },
    Passage {
        decided: Decided,
        caller: Caller,
        barrier: BarrierId,
        reply: Reply<Passage>,
    },
    Held {
        decided: Decided,
        caller: Caller,
        terms: DealTerms,
        reply: Reply<Held>,
    },
    Known {
        address: String,
        reply: Reply<Option<Known>>,
    },
    NextPhase {
        tag: String,
        reply: Reply<Phase>,
    },
    /// Without a token, the state was not replaced.
    Shared {
        token: Result<Option<u64>, ElasticError>,
        reply: Reply<Shared>,
    },
    Scaled {
        decided: Decided,
        reply: Reply<ScaleRecord>,
    },
    ShutDown {
        reply: Reply<ShutDown>,
    },
}

impl ElasticJob {
    /// Decides a request, and notes its answer. Every caller must be registered at this time.
    pub(super) fn decide(&mut self, moment: Moment, event: Event, decision: &mut Decision<Self>) {
        let answer = match event {
            Event::Announce { caller, reply } => {
                let facts = self
                    .agents
                    .registration(caller)
                    .and_then(|agent| Ok(self.state.announce(caller, agent)?));
                Answer::Done { decided: self.apply_if(moment, facts, decision), reply }
            }
            Event::Join { caller, terms, reply } => {
                let facts = self.agents.registration(caller).and_then(|agent| {
                    Ok(self.state.join(caller, agent, &terms, &self.settings)?)
                });
                let decided = self.apply_if(moment, facts, decision);
                Answer::Directive { decided, caller, known: terms.after, reply }
            }
            Event::Watch { caller, known, report, failed, reply } => {
                let is_known = self.agents.registration(caller).is_ok();
                if is_known {
                    self.failed.note(caller.node, failed, self.state.number());
                }
                if let Some(report) = report.filter(|_| is_known) {
                    self.note_report(moment.unix_ms, caller.node, report);
                }
                Answer::Change { caller, known, reply }
            }
            Event::Enter { caller, barrier, data, reply } => {
                let facts = self
                    .agents
                    .registration(caller)
                    .and_then(|_| Ok(self.state.enter(caller, &barrier, data, &self.settings)?));
                let decided = self.apply_if(moment, facts, decision);
                Answer::Passage { decided, caller, barrier, reply }
            }
            Event::Look { caller, barrier, reply } => {
                Answer::Passage { decided: Ok(()), caller, barrier, reply }
            }
            Event::Deal { caller, terms, reply } => {
                let facts = self
                    .agents
                    .registration(caller)
                    .and_then(|_| Ok(self.state.deal(caller, &terms, &self.settings)?));
                let decided = self.apply_if(moment, facts, decision);
                Answer::Held { decided, caller, terms, reply }
            }
            Event::GiveUp { caller, reason, report, reply } => {
                let nodes_needed = |agent: &AgentRecord| match agent.launched_on {
                    // The launcher starts another agent.
                    Some(_) => 0,
                    None => self.settings.nodes.min(),
                };
                let facts = self.agents.registration(caller).and_then(|agent| {
                    Ok(self.state.give_up(caller, &reason, nodes_needed(agent))?)
                });
                let decided = self.apply_if(moment, facts, decision);
                if decided.is_ok() {
                    if let Some(report) = report {
                        self.note_report(moment.unix_ms, caller.node, report);
                    }
                    self.forget_report(caller.node);
                }
                Answer::Done { decided, reply }
            }
            Event::Find { address, reply } => Answer::Known { address, reply },
            Event::NextPhase { tag, reply } => Answer::NextPhase { tag, reply },
            Event::Share { token, state, reply } => {
                let facts = state.map(|state| self.state.share(token, state)).transpose();
                let token = facts.map_err(ElasticError::from).map(|facts| {
                    let facts = facts.unwrap_or_default();
                    let is_replaced = !facts.is_empty();
                    self.apply(moment, facts, decision);
                    is_replaced.then_some(token + 1)
                });
                Answer::Shared { token, reply }
            }
            Event::Scale { wish, reply } => {
                let decided = self.state.choose_scale(wish).map_err(ElasticError::from);
                Answer::Scaled { decided: self.apply_if(moment, decided, decision), reply }
            }
            Event::ShutDown { outcome, reason, reply } => {
                let facts = self.state.shut_down(outcome, &reason);
                self.apply(moment, facts, decision);
                Answer::ShutDown { reply }
            }
        };
        self.answer_later(answer);
    }

    fn apply_if(
        &mut self,
        moment: Moment,
        facts: Result<Vec<Fact>, ElasticError>,
        decision: &mut Decision<Self>,
    ) -> Decided {
        facts.map(|facts| self.apply(moment, facts, decision))
    }

    /// Sends an answer, computed from the committed state.
    pub(super) fn answer(&self, answer: Answer) {
        match answer {
            Answer::Done { decided, reply } => drop(reply.send(decided)),
            Answer::Directive { decided, caller, known, reply } => {
                drop(reply.send(decided.and_then(|()| self.directive(caller, known))));
            }
            Answer::Change { caller, known, reply } => {
                let failed = self.failed.beside(caller.node, self.state.number());
                let failed = failed.and_then(|failed| self.state.address_of(failed));
                let failed = failed.unwrap_or_default().to_owned();
                let change = self.directive(caller, known);
                let change = change.map(|it| change_of(it, self.revision, failed));
                drop(reply.send(change));
            }
            Answer::Passage { decided, caller, barrier, reply } => {
                drop(reply.send(decided.and_then(|()| self.passage(caller, &barrier))));
            }
            Answer::Held { decided, caller, terms, reply } => {
                let held = || Ok(self.state.held(caller, &terms, &self.settings)?);
                drop(reply.send(decided.and_then(|()| held())));
            }
            Answer::Known { address, reply } => drop(reply.send(Ok(self.known(&address)))),
            Answer::NextPhase { tag, reply } => {
                drop(reply.send(Ok(self.state.next_phase(&tag))));
            }
            Answer::Shared { token, reply } => {
                let record = self.state.shared().cloned();
                let shared = token.map(|token| {
                    // A later event of the same commit may have replaced the state again.
                    let accepted = token.is_some() && record.as_ref().map(|it| it.token) == token;
                    Shared { record, accepted }
                });
                drop(reply.send(shared));
            }
            Answer::Scaled { decided, reply } => {
                drop(reply.send(decided.map(|()| self.state.scale_record())));
            }
            Answer::ShutDown { reply } => {
                let times = self.timings.rounds(steadfast_coord::now());
                drop(reply.send(Ok(ShutDown { last: self.state.number(), times })));
            }
        }
    }

    fn directive(&self, caller: Caller, known: Round) -> Result<Directive, ElasticError> {
        let now = steadfast_coord::now();
        Ok(self.state.ask(caller, known, &self.settings, &self.timers, now)?)
    }

    fn passage(&self, caller: Caller, barrier: &BarrierId) -> Result<Passage, ElasticError> {
        Ok(match self.state.barrier(caller, barrier)? {
            Outcome::Released(entries) => Passage::Released(Arc::clone(entries.data())),
            Outcome::Passed => {
                Passage::Ended { reason: "all members have passed it already".to_owned() }
            }
            Outcome::Ended(ended) => Passage::Ended { reason: describe(&ended, barrier.round) },
            Outcome::Waiting { entered, members } => {
                let missing = self.state.missing(&barrier.tag, barrier.phase);
                let tag = &barrier.tag;
                let reason = format!(
                    "barrier `{tag}`: {entered} of {members} nodes entered; waits for {missing}"
                );
                Passage::Waiting { reason }
            }
        })
    }

    fn known(&self, address: &str) -> Option<Known> {
        let (caller, lease) = self.agents.at(address)?;
        let now = steadfast_coord::now();
        let waiting = self.state.waiting_nodes(caller, &self.settings, &self.timers, now);
        let round = self.state.round().cloned();
        Some(Known { caller, lease, round, waiting_nodes: waiting.ok() })
    }
}

/// Converts what a member has to do into how its round changes.
fn change_of(directive: Directive, revision: i64, failed: String) -> Change {
    let unchanged = Change { nodes: 0, surplus: 0, lost: String::new(), revision, failed };
    match directive {
        Directive::Continue { .. } => unchanged,
        Directive::Join { added, surplus, lost } => {
            let (nodes, surplus) = match lost.count {
                0 => ((added + surplus) as i64, surplus as u32),
                lost => (-(lost as i64), 0),
            };
            let lost = if nodes < 0 { lost.to_string() } else { String::new() };
            Change { nodes, surplus, lost, failed: String::new(), ..unchanged }
        }
        // It waits for, or is a member of, a round that it does not know of: it asks again.
        Directive::Start(_)
        | Directive::Wait { .. }
        | Directive::WaitForPlace { .. }
        | Directive::TooFew { .. } => Change { nodes: 1, failed: String::new(), ..unchanged },
    }
}

fn describe(ended: &EndedBy, round: Round) -> String {
    match ended {
        EndedBy::Lost(names) => format!("round {round} lost {names}"),
        EndedBy::Rejoined(names) => format!("{names} asked for the round after {round}"),
        EndedBy::NewRound(newer) => format!("round {newer} was formed after round {round}"),
    }
}
