//! Ranks on several hosts: this host's part, until node 0 reports how the run ended.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::attempt::{self, Ended, Outcome};
use crate::error::LaunchError;
use crate::guard::End;
use crate::host::{Event, Host};
use crate::host_name::without_brackets;
use crate::node_check::{self, Fault, Found};
use crate::plan::Meeting;
use crate::rendezvous::{Coordinator, Election, Entry, FromNodeZero, Hello, Link, NodeEnd, Past, Role, ToNodeZero};
use crate::signals;

/// The pause between attempts to find node 0 by etcd.
const RETRY: Duration = Duration::from_millis(200);

/// How this host's part in a run ends.
enum Part {
    /// As node 0 has said; None if the launcher has died.
    Ended(Option<()>),
    /// Without a word from node 0.
    Lost(String),
}

/// The ranks are on several hosts, and node 0 decides.
pub fn together(host: &Host, sender: &Sender<Event>) -> End {
    let plan = &host.plan;
    match node_check::run(host)? {
        Found::Fit => {}
        Found::LauncherGone => return Ok(None),
        Found::Unfit(fault) => {
            tell_node_zero(host, sender, &fault);
            return Err(fault.into_error(host));
        }
    }
    match (&plan.endpoint, plan.meeting) {
        (None, _) => Err(LaunchError::Options("several nodes need an endpoint".to_owned())),
        (Some((name, port)), Meeting::AtNodeZero) => at_node_zero(host, sender, name, *port),
        (Some((name, port)), Meeting::AtEtcd) => at_etcd(host, sender, &Election::new(plan, name, *port)),
    }
}

/// How long a host that has failed its check tries to tell node 0 so.
const LONGEST_FAREWELL: Duration = Duration::from_secs(60);

/// Tells node 0, unless this host is node 0 itself, that this host takes no part. If that fails, node 0 hears nothing of this
/// host.
fn tell_node_zero(host: &Host, sender: &Sender<Event>, fault: &Fault) {
    let plan = &host.plan;
    let Some((name, port)) = &plan.endpoint else { return };
    let address = match plan.meeting {
        Meeting::AtNodeZero => match Entry::find(plan, name, *port) {
            Ok(Entry::Joins) => (name.clone(), *port),
            _ => return,
        },
        Meeting::AtEtcd => match Election::new(plan, name, *port).leader() {
            Ok(Some(address)) => address,
            _ => return,
        },
    };
    let hello = Hello::new(plan, &host.name, plan.node_rank, None).unfit(&fault.summary);
    let stop = || told_to_stop(host).map(LaunchError::from);
    let timeout = plan.join_timeout.min(LONGEST_FAREWELL);
    let link = Link::join(plan, hello, (&address.0, address.1), timeout, None, sender.clone(), stop);
    if let Ok(link) = link {
        // Its refusal means that it has heard.
        let until = Instant::now() + plan.silence;
        while let Ok(Event::Signal(signal_hook::consts::SIGCHLD)) = host.next_event(Some(until)) {}
        link.hang_up();
    }
}

/// Node 0 is where the endpoint is.
fn at_node_zero(host: &Host, sender: &Sender<Event>, name: &str, port: u16) -> End {
    let plan = &host.plan;
    let coordinator = match Entry::find(plan, name, port)? {
        Entry::Joins => None,
        Entry::Coordinates(listener) => {
            // The store takes IPv6 addresses without brackets.
            let master_addr = plan.master_addr.as_deref().unwrap_or(without_brackets(name));
            Some(Coordinator::start(listener, host, master_addr, None, None)?)
        }
    };
    let address = coordinator.as_ref().map_or_else(|| (name.to_owned(), port), Coordinator::local_address);
    let node_rank = if coordinator.is_some() { Some(0) } else { plan.node_rank };
    let Some(link) = join(host, sender, &address, node_rank, None, plan.join_timeout)? else { return Ok(None) };
    let place = format!("{}:{}", address.0, address.1);
    let part = take_part(host, &link, &place, &mut None);
    if let Some(coordinator) = coordinator
        && !matches!(part, Ok(Part::Ended(None)))
    {
        let _told = coordinator.finish(attempt::longest_end(plan));
    }
    match part? {
        Part::Ended(end) => Ok(end),
        Part::Lost(why) => Err(lost(&place, &why)),
    }
}

/// The nodes elect node 0, and when it is lost another one.
fn at_etcd(host: &Host, sender: &Sender<Event>, election: &Election) -> End {
    let plan = &host.plan;
    // What the next node 0 starts from.
    let mut past: Option<Past> = None;
    let mut start = Instant::now();
    let mut why = String::new();
    loop {
        match told_to_stop(host) {
            None => {}
            Some(Stop::LauncherGone) => return Ok(None),
            Some(stop) => return Err(stop.into()),
        }
        if start.elapsed() > plan.join_timeout {
            return Err(LaunchError::NodesMissing(format!(
                "the launchers did not meet within {} s by etcd at {}: {why}",
                plan.join_timeout.as_secs_f64(),
                election.place()
            )));
        }
        let role = match election.find() {
            Err(LaunchError::NodesMissing(error)) => {
                why = error;
                std::thread::sleep(RETRY);
                continue;
            }
            other => other?,
        };
        let (address, coordinator) = match role {
            Role::Follows(host, port) => ((host, port), None),
            Role::Leads { listener, own, lease } => {
                let master_addr = plan.master_addr.as_deref().unwrap_or(&own);
                let coordinator = Coordinator::start(listener, host, master_addr, past, Some(lease))?;
                (coordinator.local_address(), Some(coordinator))
            }
        };
        let node_rank = coordinator.as_ref().map(|_| 0);
        // etcd names a lost node 0 until its lease has ended, so only this host's own is waited for.
        let timeout = if coordinator.is_some() { plan.join_timeout } else { 2 * RETRY };
        let link = match join(host, sender, &address, node_rank, past, timeout) {
            Err(LaunchError::NodesMissing(error)) => {
                why = error;
                std::thread::sleep(RETRY);
                continue;
            }
            other => other?,
        };
        let Some(link) = link else { return Ok(None) };
        let place = format!("{}:{}", address.0, address.1);
        let mut started = None;
        let part = take_part(host, &link, &place, &mut started);
        if matches!(part, Ok(Part::Lost(_))) {
            link.hang_up();
        }
        let is_over = match coordinator {
            Some(coordinator) if !matches!(part, Ok(Part::Ended(None))) => {
                coordinator.finish(attempt::longest_end(plan))
            }
            _ => true,
        };
        match part? {
            Part::Ended(end) => return Ok(end),
            Part::Lost(how) if !is_over => return Err(lost(&place, &how)),
            Part::Lost(how) => {
                let what = format!("node 0 at {place} was lost: {how}");
                // Without a start since the last loss, nothing more was lost.
                if let Some(last) = started {
                    // In a run of fixed size this is a failure, as the loss of any node.
                    if !plan.is_elastic() && last.restarts == plan.max_restarts {
                        return Err(LaunchError::NodeLost(what));
                    }
                    past = Some(last.after_a_loss(plan.is_elastic()));
                }
                host.console.say(&format!("{what}; meeting again by etcd at {}", election.place()));
                (start, why) = (Instant::now(), what);
            }
        }
    }
}

/// Connects to node 0. None if the launcher has died meanwhile.
fn join(
    host: &Host,
    sender: &Sender<Event>,
    address: &(String, u16),
    node_rank: Option<usize>,
    past: Option<Past>,
    timeout: Duration,
) -> Result<Option<Link>, LaunchError> {
    let mut gone = false;
    let stop = || {
        let stop = told_to_stop(host)?;
        gone = matches!(stop, Stop::LauncherGone);
        Some(stop.into())
    };
    let plan = &host.plan;
    let hello = Hello::new(plan, &host.name, node_rank, past);
    // By etcd, node 0 is looked for again and again; only the last failure is shown.
    let console = (plan.meeting == Meeting::AtNodeZero).then_some(&*host.console);
    match Link::join(plan, hello, (&address.0, address.1), timeout, console, sender.clone(), stop) {
        Err(_) if gone => Ok(None),
        other => other.map(Some),
    }
}

fn lost(endpoint: &str, why: &str) -> LaunchError {
    LaunchError::NodeLost(format!("node 0 at {endpoint} was lost: {why}"))
}

/// Runs attempts when node 0 starts them, until node 0 reports how the run ended.
/// Notes in `started` what was started last.
fn take_part(host: &Host, link: &Link, endpoint: &str, started: &mut Option<Past>) -> Result<Part, LaunchError> {
    let mut attempt = 0;
    // By when node 0 has to start another attempt or end the run. Set when an attempt has not succeeded here.
    let mut give_up_at: Option<Instant> = None;
    loop {
        let said = match host.next_event(give_up_at) {
            Ok(Event::NodeZero(said)) => said,
            Ok(Event::LauncherGone) => return Ok(Part::Ended(None)),
            Ok(Event::Signal(signal)) if signals::ends_the_run(signal) => {
                link.send(&ToNodeZero::Ended { attempt, how: NodeEnd::Interrupted(signal), ends: Vec::new() });
                return Err(LaunchError::Interrupted { signal, host: None });
            }
            Ok(Event::Signal(_)) => continue,
            Err(_) => return Err(lost(endpoint, "after a failure it sent neither a restart nor a result")),
        };
        let team = match said {
            FromNodeZero::Start(team) => team,
            FromNodeZero::Finish(result) => return result.map(|()| Part::Ended(Some(()))),
            FromNodeZero::Refused(reason) => {
                return Err(LaunchError::Refused { endpoint: endpoint.to_owned(), reason });
            }
            FromNodeZero::Lost(why) => return Ok(Part::Lost(why)),
            // All ranks here have ended already.
            FromNodeZero::Stop { .. } | FromNodeZero::Alive => continue,
        };
        attempt = team.attempt;
        *started = Some(Past { attempt, restarts: team.restarts, nnodes: team.nnodes });
        let (how, ends) = match attempt::run(host, &team) {
            Err(error) => (NodeEnd::Broken(error), Vec::new()),
            Ok(Ended { outcome, ends, told_to_end, .. }) => match outcome {
                Outcome::Done => (NodeEnd::Done, ends),
                Outcome::Failed(failures) => {
                    let (age, first, also) = failures.into_parts();
                    (NodeEnd::Failed { age, first, also, told_to_end: told_to_end.is_some() }, ends)
                }
                Outcome::Interrupted(signal) => (NodeEnd::Interrupted(signal), ends),
                Outcome::NodeZero(FromNodeZero::Finish(result)) => return result.map(|()| Part::Ended(Some(()))),
                Outcome::NodeZero(FromNodeZero::Lost(why)) => {
                    return match told_to_end {
                        Some(signal) => Err(LaunchError::Interrupted { signal, host: None }),
                        None => Ok(Part::Lost(why)),
                    };
                }
                Outcome::NodeZero(_) => (told_to_end.map_or(NodeEnd::Stopped, NodeEnd::Interrupted), ends),
                Outcome::LauncherGone => return Ok(Part::Ended(None)),
            },
        };
        let limit = attempt::longest_end(&host.plan) + host.plan.join_timeout + host.plan.last_call;
        give_up_at = (how != NodeEnd::Done).then(|| Instant::now() + limit);
        link.send(&ToNodeZero::Ended { attempt, how, ends });
    }
}

/// Why the launcher stops waiting for node 0.
enum Stop {
    LauncherGone,
    Signal(i32),
}

impl From<Stop> for LaunchError {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::LauncherGone => Self::Guard("the launcher is gone".to_owned()),
            Stop::Signal(signal) => Self::Interrupted { signal, host: None },
        }
    }
}

fn told_to_stop(host: &Host) -> Option<Stop> {
    host.beat();
    host.events.try_iter().find_map(|event| match event {
        Event::LauncherGone => Some(Stop::LauncherGone),
        Event::Signal(signal) if signals::ends_the_run(signal) => Some(Stop::Signal(signal)),
        _ => None,
    })
}
