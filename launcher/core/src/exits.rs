//! Decides what follows from the end of an agent, of a wait and of the job.

use std::iter;

use steadfast_common::ids::Millis;
use steadfast_common::records::launch::{LaunchedAgent, Outcome, Phase, StopReason};

use crate::blacklist::wait_end;
use crate::hosts::{Host, HostName};
use crate::launcher::{FACTS_MAX, Fact, Launcher};
use crate::placement::listed;
use crate::settings::Context;

/// How an agent exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Its workers have finished the job.
    Succeeded,
    /// It exited in any other way, was lost, or could not be started.
    Failed,
}

impl Launcher {
    /// Decides what follows from the exit of an agent. A repeated report has no effect. `random` is drawn
    /// from all numbers.
    pub fn exited(
        &self,
        host: &HostName,
        launch: u64,
        exit: Exit,
        random: u64,
        context: Context,
    ) -> Vec<Fact> {
        let Some(agent) = self.agent(host).filter(|agent| agent.launch == launch) else {
            return Vec::new();
        };
        let stopped = Fact::Stopped { host: host.clone() };
        let has_ended = self.record.outcome.is_some();
        match (agent.phase, exit) {
            (Phase::Restarting, _) => Vec::new(),
            (Phase::Stopping { reason: StopReason::SlotsChanged }, _) if !has_ended => {
                vec![Fact::RestartPending { host: host.clone() }]
            }
            (Phase::Running, Exit::Succeeded) if !has_ended => {
                vec![stopped, Fact::Ended(Outcome::Succeeded)]
            }
            (Phase::Running, Exit::Failed) if !has_ended => self.failed(host, random, context),
            // An agent that was asked to stop neither fails nor finishes the job.
            (Phase::Stopping { .. } | Phase::Running, Exit::Succeeded | Exit::Failed) => {
                vec![stopped]
            }
        }
    }

    /// Ends the job. Its agents are stopped by what is [`Launcher::due`] then.
    pub fn end(&self, outcome: Outcome) -> Vec<Fact> {
        match self.record.outcome {
            None => vec![Fact::Ended(outcome)],
            Some(_) => Vec::new(),
        }
    }

    /// Returns the facts for which the time has come. The caller calls this after each commit and poll, and at the
    /// [`Launcher::deadline`], until it returns none.
    pub fn due(&self, context: Context) -> Vec<Fact> {
        if let Some(outcome) = &self.record.outcome {
            return self.wind_up(outcome, context);
        }
        for decide in [Self::waits_over, Self::gives_up, Self::stops, Self::starts, Self::settles] {
            let facts = decide(self, context);
            if !facts.is_empty() {
                return facts;
            }
        }
        Vec::new()
    }

    /// Returns the next time at which something is due without another event.
    pub fn deadline(&self, context: Context) -> Option<Millis> {
        if let Some(outcome) = &self.record.outcome {
            let may_run = self.agents().any(|(_, agent)| agent.phase == Phase::Running);
            return self.finish_end(outcome, context).filter(|_| may_run);
        }
        let waits = self.hosts.iter().filter_map(|(host, record)| wait_end(host, record, context));
        waits.chain(give_up_time(context)).min()
    }

    /// Returns the facts after a failure of the agent on `host`. The failure ends the job if no other agent is left and
    /// each discovered host has failed; otherwise it is a change of the set of agents.
    fn failed(&self, host: &HostName, random: u64, context: Context) -> Vec<Fact> {
        let failures = self.hosts.get(host).map_or(0, |record| record.failures);
        let cooldown_ms = context.settings.cooldown.length_ms(failures, random);
        let failed = Fact::Failed { host: host.clone(), cooldown_ms };
        let has_failed = |name: &HostName| {
            name == host || self.hosts.get(name).is_some_and(|record| 0 < record.failures)
        };
        let is_last = self.agents().all(|(name, _)| name == host);
        let are_all = |hosts: &[Host]| hosts.iter().all(|it| has_failed(&it.name));
        let next = if is_last && context.discovered.is_some_and(are_all) {
            let hosts = listed(self.hosts.keys().filter(|name| has_failed(name)));
            Some(Fact::Ended(Outcome::AllFailed { hosts }))
        } else {
            self.reset(context.settings)
        };
        iter::once(failed).chain(next).collect()
    }

    fn gives_up(&self, context: Context) -> Vec<Fact> {
        let is_time = give_up_time(context).is_some_and(|time| time <= context.now);
        let shortage = self.shortage(context.settings, context.discovered).filter(|_| is_time);
        let ended = shortage.map(|shortage| {
            let waited_ms = context.settings.elastic_timeout_ms;
            Fact::Ended(Outcome::TooFewSlots { waited_ms, shortage: shortage.to_string() })
        });
        Vec::from_iter(ended)
    }

    /// Stops the agents of a job that has ended.
    fn wind_up(&self, outcome: &Outcome, context: Context) -> Vec<Fact> {
        let may_run = self.finish_end(outcome, context).is_some_and(|end| context.now < end);
        let stop = |(host, agent): (&HostName, &LaunchedAgent)| {
            let (host, launch, reason) = (host.clone(), agent.launch, StopReason::JobEnded);
            match agent.phase {
                Phase::Running if may_run => None,
                Phase::Running => Some(Fact::StopRequested { host, launch, reason }),
                Phase::Stopping { .. } => None,
                Phase::Restarting => Some(Fact::Stopped { host }),
            }
        };
        self.agents().filter_map(stop).take(FACTS_MAX).collect()
    }

    /// Returns until when agents may run after a success.
    fn finish_end(&self, outcome: &Outcome, context: Context) -> Option<Millis> {
        let since = context.timers.ended_since.unwrap_or(context.now);
        let end = Millis(since.0.saturating_add(context.settings.finish_timeout_ms));
        (*outcome == Outcome::Succeeded).then_some(end)
    }
}

fn give_up_time(context: Context) -> Option<Millis> {
    let since = context.timers.short_since?;
    Some(Millis(since.0.saturating_add(context.settings.elastic_timeout_ms)))
}
