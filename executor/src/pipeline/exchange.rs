//! Rows on their way between the parts of a step: posted, arrived, handed over on this rank, about to leave.

use std::collections::BTreeMap;

use dflop_balancer::schedule::{Action, Part};

use super::edge::{Edge, Flow, Transfer, View};
use crate::comm::{Handle, Payload, PayloadShape};
use crate::device::Device;
use crate::error::{Error, Result};

/// Actions by which receives are posted ahead of the one that waits for them.
const POSTED_AHEAD: usize = 16;

type Key = (Flow, Edge);

/// All rows of one step that are not inside a stage.
pub(super) struct Exchange<D: Device> {
    posted: BTreeMap<Key, Handle<Payload>>,
    /// Actions whose receives are posted.
    posted_until: usize,
    arrived: BTreeMap<Key, Vec<f32>>,
    handed: BTreeMap<Key, D::Floats>,
    leaving: BTreeMap<Key, Vec<f32>>,
    sends: Vec<Handle<()>>,
}

impl<D: Device> Default for Exchange<D> {
    fn default() -> Self {
        Self {
            posted: BTreeMap::new(),
            posted_until: 0,
            arrived: BTreeMap::new(),
            handed: BTreeMap::new(),
            leaving: BTreeMap::new(),
            sends: Vec::new(),
        }
    }
}

impl<D: Device> Exchange<D> {
    /// Posts the receives of the next actions.
    pub(super) fn post(&mut self, view: &View<'_, D>, list: &[Action], next: usize) -> Result<()> {
        let until = (next + POSTED_AHEAD).min(list.len());
        for &action in &list[self.posted_until.min(until)..until] {
            let Some(transfer) = view.transfer(action).filter(|transfer| !transfer.is_send) else { continue };
            let Transfer { flow, edge, peer, .. } = transfer;
            let rows = view.rows(flow, edge)?;
            if rows > 0 {
                let from = view.job.source(peer, view.place);
                let shape = PayloadShape::f32(rows, view.width(edge));
                let handle = view.comm.start_recv(from, edge.tag(flow), view.at_edge(transfer), shape)?;
                self.posted.insert((flow, edge), handle);
            }
        }
        self.posted_until = self.posted_until.max(until);
        Ok(())
    }

    /// Sends what is leaving, or waits for what was posted; nothing if the edge has no rows.
    pub(super) fn run(&mut self, view: &View<'_, D>, transfer: Transfer) -> Result<()> {
        let Transfer { flow, edge, .. } = transfer;
        if view.rows(flow, edge)? == 0 {
            return Ok(());
        }
        if transfer.is_send {
            return self.send(view, transfer);
        }
        let handle = self.posted.remove(&(flow, edge)).ok_or_else(|| order(edge.taker, "awaits nothing"))?;
        if let Some(rows) = handle.wait()?.into_f32() {
            self.arrived.insert((flow, edge), rows);
        }
        Ok(())
    }

    fn send(&mut self, view: &View<'_, D>, transfer: Transfer) -> Result<()> {
        let Transfer { flow, edge, peer, .. } = transfer;
        let Some(rows) = self.leaving.remove(&(flow, edge)) else {
            let part = if flow == Flow::Activations { edge.giver } else { edge.taker };
            return Err(order(part, "has nothing to send"));
        };
        let (width, at) = (view.width(edge), view.at_edge(transfer));
        let targets: Vec<usize> = view.job.targets(view.place, peer).collect();
        let Some((last, others)) = targets.split_last() else { return Ok(()) };
        for &to in others {
            let payload = Payload::f32(rows.len() / width, width, rows.clone())?;
            self.sends.push(view.comm.start_send(to, edge.tag(flow), at, payload)?);
        }
        let payload = Payload::f32(rows.len() / width, width, rows)?;
        self.sends.push(view.comm.start_send(*last, edge.tag(flow), at, payload)?);
        Ok(())
    }

    /// Waits until everything has left, and checks that nothing is left over.
    pub(super) fn finish(&mut self) -> Result<()> {
        std::mem::take(&mut self.sends).into_iter().try_for_each(Handle::wait)?;
        let left = self.leaving.keys().chain(self.arrived.keys()).chain(self.handed.keys());
        match left.chain(self.posted.keys()).next() {
            Some((_, edge)) => Err(order(edge.taker, "was given rows that no one asked for")),
            None => Ok(()),
        }
    }

    /// The rows that a part takes: of the stage beside it, or put together from those of all routes. `None` if it takes none.
    pub(super) fn take(
        &mut self,
        view: &View<'_, D>,
        device: &D,
        flow: Flow,
        part: Part,
    ) -> Result<Option<D::Floats>> {
        let edges = view.edges(flow, part, false);
        let Some(&first) = edges.first() else { return Ok(None) };
        if !view.is_routed(first) {
            return self.take_direct(device, flow, first, part).map(Some);
        }
        let width = view.width(first);
        let rows = match flow {
            Flow::Activations => view.work.plan.media_tokens(part.microbatch),
            Flow::Gradients => view.route(first).0.source_tokens(part.microbatch),
        };
        if rows == 0 {
            return Ok(None);
        }
        let mut whole = vec![0.0; rows * width];
        for edge in edges {
            if view.rows(flow, edge)? > 0 {
                let message = self.arrived.remove(&(flow, edge)).ok_or_else(|| order(part, "lacks rows"))?;
                let (route, pair) = view.route(edge);
                route.unpack(pair, view.end(part), &message, &mut whole, width);
            }
        }
        device.upload(&whole).map(Some)
    }

    fn take_direct(&mut self, device: &D, flow: Flow, edge: Edge, part: Part) -> Result<D::Floats> {
        if let Some(rows) = self.handed.remove(&(flow, edge)) {
            return Ok(rows);
        }
        let rows = self.arrived.remove(&(flow, edge)).ok_or_else(|| order(part, "lacks rows"))?;
        device.upload(&rows)
    }

    /// Puts what a part computed where the next parts find it: on this rank, or among what is leaving.
    pub(super) fn give(
        &mut self,
        view: &View<'_, D>,
        device: &D,
        flow: Flow,
        part: Part,
        rows: Option<D::Floats>,
    ) -> Result<()> {
        let mut carried = Vec::new();
        for edge in view.edges(flow, part, true) {
            if view.rows(flow, edge)? > 0 {
                carried.push(edge);
            }
        }
        let Some(&first) = carried.first() else { return Ok(()) };
        let rows = rows.ok_or_else(|| order(part, "gives no rows"))?;
        if view.is_routed(first) {
            let host = device.download(&rows)?;
            for edge in carried {
                let (route, pair) = view.route(edge);
                let message = route.pack(pair, view.end(part), &host, view.width(edge));
                self.leaving.insert((flow, edge), message);
            }
            return Ok(());
        }
        let other = if first.giver == part { first.taker } else { first.giver };
        if view.topology.rank(other) == view.place.pipeline_rank {
            self.handed.insert((flow, first), rows);
        } else {
            self.leaving.insert((flow, first), device.download(&rows)?);
        }
        Ok(())
    }
}

fn order(part: Part, problem: &'static str) -> Error {
    Error::Order { stage: part.stage.to_string(), microbatch: part.microbatch as usize, problem }
}
