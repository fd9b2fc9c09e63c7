//! The control thread: a session, its connection, where layers lie, and what the device says.

use std::convert::Infallible;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use atlas_rdma::AsyncEvent;
use expert_store::codec;
use expert_wire::frame::FrameKind;
use expert_wire::message::{CatalogueRequest, SECTION_SEGMENTS};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::lane::Lane;
use super::{Attempt, LayerSlot, Leave, NAP, Opened};
use crate::control::{AskError, Connection};
use crate::engine::later;
use crate::notify::Wake;
use crate::rail::{ContentTag, RailEvent, ReadError};
use crate::rails::verbs::session::{self, ControlStream, Session};
use crate::sync::lock;

/// Time for a question on the control connection, and for the rest of a frame that has begun.
const ASK_TIME: Duration = Duration::from_secs(5);

impl Attempt {
    /// The control thread: opens a session, starts the lanes, and attends to the connection.
    pub(super) fn live(self: &Arc<Self>) -> Result<Infallible, String> {
        let limit = later(Instant::now(), self.config.connect_timeout);
        let keep = |stream: &TcpStream| {
            let mut state = lock(&self.state);
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            state.socket = Some(stream.try_clone().map_err(|e| e.to_string())?);
            Ok(())
        };
        // What the device said while nobody listened is history: the port is looked at next.
        let context = self.config.local().context();
        while context
            .async_event(Duration::ZERO)
            .map_err(|e| e.to_string())?
            .is_some()
        {}
        let session = session::open(&self.config, limit, &keep)?;
        let Session {
            control,
            content,
            memory,
            queues,
            peer_rail,
            member,
        } = session;
        let now = self.rail.now_ms();
        let lanes = queues
            .into_iter()
            .map(|queue| {
                let wake = Wake::new().map_err(|e| format!("no descriptor for a lane: {e}"))?;
                Ok(Lane::new(queue, wake, now))
            })
            .collect::<Result<Vec<_>, String>>()?;
        let opened = Arc::new(Opened {
            content,
            epoch: match &control {
                ControlStream::V2(connection) => connection.welcome().epoch,
                ControlStream::V1(_) => 0,
            },
            lanes,
            memory,
        });
        for index in 0..opened.lanes.len() {
            self.live_threads.fetch_add(1, Ordering::AcqRel);
            let spawned = std::thread::Builder::new()
                .name(format!("verbs-lane-{index}"))
                .spawn({
                    let (attempt, opened) = (self.clone(), opened.clone());
                    move || {
                        let _leave = Leave(&attempt);
                        attempt.run_lane(&opened, index);
                    }
                });
            if let Err(e) = spawned {
                self.live_threads.fetch_sub(1, Ordering::AcqRel);
                return Err(format!("no thread for a queue pair: {e}"));
            }
        }
        {
            let mut state = lock(&self.state);
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            state.opened = Some(opened.clone());
            state.member = member;
            if let ControlStream::V2(connection) = &control {
                state.layers = self.rail.layers_of(run_of(connection));
            }
            tracing::debug!(rail = %self.config.local().name(), peer = %peer_rail, "paired");
            self.rail.push(RailEvent::Ready(content));
        }
        self.attend(control, &opened)
    }

    /// Answers what comes on the control connection, asks for layers, and watches the device.
    fn attend(&self, mut control: ControlStream, opened: &Opened) -> Result<Infallible, String> {
        let context = self.config.local().context().clone();
        let nap = Timespec {
            tv_sec: 0,
            tv_nsec: NAP.as_nanos() as i64,
        };
        loop {
            if let Some(error) = &lock(&self.state).error {
                return Err(error.clone());
            }
            while let Some(event) = context
                .async_event(Duration::ZERO)
                .map_err(|e| e.to_string())?
            {
                self.note_device_event(event)?;
            }
            if let ControlStream::V2(connection) = &mut control {
                self.send_reports(connection)?;
                self.load_layers(connection)?;
            }
            let mut fds = [
                PollFd::from_borrowed_fd(control.stream().as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(context.event_fd(), PollFlags::IN),
            ];
            if poll(&mut fds, Some(&nap)).is_err() {
                continue; // interrupted
            }
            let said_something = !fds[0].revents().is_empty();
            if !fds[1].revents().is_empty() {
                self.wake.clear();
            }
            if said_something {
                match &mut control {
                    ControlStream::V2(connection) => {
                        connection
                            .take_notice(later(Instant::now(), ASK_TIME))
                            .map_err(|e| e.to_string())?;
                        if ContentTag::of(connection.welcome()) != opened.content
                            || connection.welcome().epoch != opened.epoch
                        {
                            return Err("the peer loaded its store again".into());
                        }
                    }
                    // v1 says nothing more: this is the end.
                    ControlStream::V1(_) => return Err("the peer hung up".into()),
                }
            }
        }
    }

    fn note_device_event(&self, event: AsyncEvent) -> Result<(), String> {
        match event {
            AsyncEvent::PortDown { port } if port == self.config.local().port() => {
                Err("the port lost its link".into())
            }
            AsyncEvent::DeviceFatal => Err("the device failed".into()),
            AsyncEvent::QpFatal { qpn } => Err(format!("queue pair {qpn} failed")),
            other => {
                tracing::debug!(rail = %self.config.local().name(), "{other:?}");
                Ok(())
            }
        }
    }

    fn send_reports(&self, connection: &mut Connection) -> Result<(), String> {
        loop {
            let Some(report) = lock(&self.state).reports.pop_front() else {
                return Ok(());
            };
            let limit = later(Instant::now(), ASK_TIME);
            connection
                .tell(FrameKind::ChecksumReport, &report.encode(), limit)
                .map_err(|e| e.to_string())?;
        }
    }

    /// Asks where the wanted layers lie, one after the other; what waits for each goes on.
    fn load_layers(&self, connection: &mut Connection) -> Result<(), String> {
        loop {
            let Some(layer) = lock(&self.state).wanted.pop_front() else {
                return Ok(());
            };
            let request = CatalogueRequest {
                layer,
                sections: SECTION_SEGMENTS,
            };
            let before = *connection.welcome();
            let answer = connection.ask(
                FrameKind::Catalogue,
                &request.encode(),
                FrameKind::CatalogueReply,
                later(Instant::now(), ASK_TIME),
            );
            if *connection.welcome() != before {
                return Err("the peer loaded its store again".into());
            }
            let slot = match answer {
                Ok(blob) => match codec::decode_layer(&blob) {
                    Ok(got) if got.layer == layer => {
                        let got = Arc::new(got);
                        self.rail.note_layer(run_of(connection), &got);
                        LayerSlot::Known(got)
                    }
                    Ok(_) => LayerSlot::Unusable("the peer described another layer".into()),
                    Err(why) => LayerSlot::Unusable(format!("the peer's catalogue: {why}")),
                },
                // A refusal that may pass concerns the READs that wait, not the next ones.
                Err(AskError::Refused(frame)) if frame.retryable => {
                    let slot = lock(&self.state).layers.remove(&layer);
                    if let Some(LayerSlot::Asked(parked)) = slot {
                        for read in parked {
                            let why = ReadError::Unavailable(frame.message.clone());
                            self.rail.complete(read, Err(why));
                        }
                    }
                    continue;
                }
                Err(AskError::Refused(frame)) => LayerSlot::Unusable(frame.message),
                Err(e) => return Err(e.to_string()),
            };
            let mut state = lock(&self.state);
            if let Some(LayerSlot::Asked(parked)) = state.layers.insert(layer, slot) {
                state.backlog.extend(parked);
            }
            drop(state);
            self.rail.notifier.notify();
        }
    }
}

/// What tells one state of the peer's store from another, where layers lie included.
fn run_of(connection: &Connection) -> (u64, u32) {
    let welcome = connection.welcome();
    (welcome.instance_id, welcome.epoch)
}
