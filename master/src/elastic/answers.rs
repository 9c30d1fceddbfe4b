//! Decides events, and answers them after the commit.

use std::sync::Arc;

use steadfast_common::ids::{Phase, Round};
use steadfast_common::rendezvous::AgentRecord;
use steadfast_master_core::rendezvous::{Caller, Directive, EndedBy, Outcome, Place};

use super::handle::{Change, ElasticError, Event, Known, Passage, Reply, Shared, ShutDown};
use super::{Batch, ElasticLoop};

/// An answer that is computed from the state after the commit.
pub(super) enum Answer {
    Done { reply: Reply<()> },
    Directive { caller: Caller, known: Round, reply: Reply<Directive> },
    Change { caller: Caller, known: Round, reply: Reply<Change> },
    Passage { caller: Caller, place: Place, reply: Reply<Passage> },
    Known { address: String, reply: Reply<Option<Known>> },
    NextPhase { tag: String, reply: Reply<Phase> },
    Shared { token: u64, reply: Reply<Shared> },
    ShutDown { reply: Reply<ShutDown> },
}

fn reject<T>(reply: Reply<T>, error: impl Into<ElasticError>) {
    let _ = reply.send(Err(error.into()));
}

impl ElasticLoop {
    /// Decides an event, and notes its answer. Every caller must be registered at this time.
    pub(super) fn decide(&mut self, event: Event, batch: &mut Batch) {
        let keys = self.committer.keys.clone();
        match event {
            Event::Announce { caller, reply } => {
                let decided = self
                    .agents
                    .registration(caller)
                    .and_then(|agent| Ok(batch.state.announce(caller, agent)?));
                match decided {
                    Ok(facts) => {
                        batch.add(&keys, facts);
                        batch.answers.push(Answer::Done { reply });
                    }
                    Err(error) => reject(reply, error),
                }
            }
            Event::Join { caller, terms, reply } => {
                let decided = self.agents.registration(caller).and_then(|agent| {
                    Ok(batch.state.join(caller, agent, &terms, &self.settings)?)
                });
                match decided {
                    Ok(facts) => {
                        batch.add(&keys, facts);
                        let known = terms.after;
                        batch.answers.push(Answer::Directive { caller, known, reply });
                    }
                    Err(error) => reject(reply, error),
                }
            }
            Event::Watch { caller, known, report, failed, reply } => {
                let is_known = self.agents.registration(caller).is_ok();
                if is_known {
                    self.failed.note(caller.node, failed, batch.state.number());
                }
                if let Some(report) = report.filter(|_| is_known) {
                    self.note_report(caller.node, report);
                }
                batch.answers.push(Answer::Change { caller, known, reply });
            }
            Event::Enter { caller, place, data, reply } => {
                let decided = self
                    .agents
                    .registration(caller)
                    .and_then(|_| Ok(batch.state.enter(caller, &place, data)?));
                match decided {
                    Ok(facts) => {
                        batch.add(&keys, facts);
                        batch.answers.push(Answer::Passage { caller, place, reply });
                    }
                    Err(error) => reject(reply, error),
                }
            }
            Event::Look { caller, place, reply } => {
                batch.answers.push(Answer::Passage { caller, place, reply });
            }
            Event::GiveUp { caller, reason, report, reply } => {
                let nodes_needed = |agent: &AgentRecord| match agent.launched_on {
                    // The launcher starts another agent.
                    Some(_) => 0,
                    None => self.settings.nodes.min(),
                };
                let decided = self.agents.registration(caller).and_then(|agent| {
                    Ok(batch.state.give_up(caller, &reason, nodes_needed(agent))?)
                });
                match decided {
                    Ok(facts) => {
                        batch.add(&keys, facts);
                        if let Some(report) = report {
                            self.note_report(caller.node, report);
                        }
                        self.forget_report(caller.node);
                        batch.answers.push(Answer::Done { reply });
                    }
                    Err(error) => reject(reply, error),
                }
            }
            Event::Find { address, reply } => batch.answers.push(Answer::Known { address, reply }),
            Event::NextPhase { tag, reply } => {
                batch.answers.push(Answer::NextPhase { tag, reply });
            }
            Event::Share { token, state, reply } => {
                let decided = state.map(|state| batch.state.share(token, state)).transpose();
                match decided {
                    Ok(facts) => {
                        let accepted = facts.as_ref().is_some_and(|facts| !facts.is_empty());
                        let token = if accepted { token + 1 } else { 0 };
                        batch.add(&keys, facts.unwrap_or_default());
                        batch.answers.push(Answer::Shared { token, reply });
                    }
                    Err(refusal) => reject(reply, refusal),
                }
            }
            Event::ShutDown { outcome, reason, reply } => {
                let facts = batch.state.shut_down(outcome, &reason);
                batch.add(&keys, facts);
                batch.answers.push(Answer::ShutDown { reply });
            }
        }
    }

    /// Sends an answer, computed from the committed state.
    pub(super) fn answer(&self, answer: Answer) {
        match answer {
            Answer::Done { reply } => drop(reply.send(Ok(()))),
            Answer::Directive { caller, known, reply } => {
                drop(reply.send(self.directive(caller, known)));
            }
            Answer::Change { caller, known, reply } => {
                let failed = self.failed.beside(caller.node, self.state.number());
                let failed = failed.and_then(|failed| self.state.address_of(failed));
                let failed = failed.unwrap_or_default().to_owned();
                let change = self.directive(caller, known);
                let change = change.map(|it| change_of(it, self.revision, failed));
                drop(reply.send(change));
            }
            Answer::Passage { caller, place, reply } => {
                drop(reply.send(self.passage(caller, &place)));
            }
            Answer::Known { address, reply } => drop(reply.send(Ok(self.known(&address)))),
            Answer::NextPhase { tag, reply } => {
                drop(reply.send(Ok(self.state.next_phase(&tag))));
            }
            Answer::Shared { token, reply } => {
                let record = self.state.shared().cloned();
                // A later event of the same commit may have replaced the state again.
                let accepted = token != 0 && record.as_ref().is_some_and(|it| it.token == token);
                drop(reply.send(Ok(Shared { record, accepted })));
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

    fn passage(&self, caller: Caller, place: &Place) -> Result<Passage, ElasticError> {
        Ok(match self.state.barrier(caller, place)? {
            Outcome::Released(entries) => Passage::Released(Arc::clone(entries.data())),
            Outcome::Passed => {
                Passage::Ended { reason: "all members have passed it already".to_owned() }
            }
            Outcome::Ended(ended) => Passage::Ended { reason: describe(&ended, place.round) },
            Outcome::Waiting { entered, members } => {
                let missing = self.state.missing(&place.tag, place.phase);
                let tag = &place.tag;
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
    let (nodes, lost) = match directive {
        Directive::Continue { .. } => {
            return Change { nodes: 0, lost: String::new(), revision, failed };
        }
        Directive::Join { added, lost } if lost.count == 0 => (added as i64, String::new()),
        Directive::Join { lost, .. } => (-(lost.count as i64), lost.to_string()),
        // It waits for, or is a member of, a round that it does not know of: it asks again.
        Directive::Start(_)
        | Directive::Wait { .. }
        | Directive::WaitForPlace { .. }
        | Directive::TooFew { .. } => (1, String::new()),
    };
    Change { nodes, lost, revision, failed: String::new() }
}

fn describe(ended: &EndedBy, round: Round) -> String {
    match ended {
        EndedBy::Lost(names) => format!("round {round} lost {names}"),
        EndedBy::Rejoined(names) => format!("{names} asked for the round after {round}"),
        EndedBy::NewRound(newer) => format!("round {newer} was formed after round {round}"),
    }
}
