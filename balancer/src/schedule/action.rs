//! Rank actions: passes, messages between ranks, gradient sums.

use std::fmt;

/// Action on a rank. Executors and the simulator need only a list of actions.
///
/// Messages are named by the rank's own stage: `Recv` brings the stage's input, `Send` takes the stage's
/// output away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Receives the activations that a forward pass starts from.
    Recv(Message),
    /// Computes the stage's layers, and keeps what the backward pass needs.
    Forward(Part),
    /// Sends the activations to the next stage.
    Send(Message),
    /// Receives the gradient for the activations that were sent.
    RecvGrad(Message),
    /// Computes all gradients, and frees what the forward pass kept.
    Backward(Part),
    /// Computes only the input gradient; keeps what the weight gradient needs.
    BackwardInput(Part),
    /// Computes the weight gradient, and frees the rest.
    BackwardWeight(Part),
    /// Sends the gradient for the received activations back.
    SendGrad(Message),
    /// Sums this stage's gradients over the ranks that hold the stage, after the last backward pass.
    ReduceGrads(u16),
}

/// Microbatch in a stage, a *part* of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Part {
    /// Microbatch index in the step.
    pub microbatch: u32,
    /// Pipeline stage index, a *virtual* stage if ranks hold several.
    pub stage: u16,
}

/// Activations or gradients in transit between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// Microbatch index in the step.
    pub microbatch: u32,
    /// Index of this rank's stage.
    pub stage: u16,
    /// Rank index at the opposite end.
    pub peer: u16,
}

/// Values that a pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PassKind {
    /// Stage layer activations.
    Forward,
    /// Input and weight gradients.
    Backward,
    /// Input gradient.
    BackwardInput,
    /// Weight gradient.
    BackwardWeight,
}

/// Microbatch pass through a stage: an action that computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pass {
    /// Computed values.
    pub kind: PassKind,
    /// Microbatch and stage.
    pub part: Part,
}

impl Action {
    /// Returns the pass if the action computes a pass.
    #[must_use]
    pub fn pass(self) -> Option<Pass> {
        let (kind, part) = match self {
            Self::Forward(part) => (PassKind::Forward, part),
            Self::Backward(part) => (PassKind::Backward, part),
            Self::BackwardInput(part) => (PassKind::BackwardInput, part),
            Self::BackwardWeight(part) => (PassKind::BackwardWeight, part),
            Self::Recv(_) | Self::Send(_) | Self::RecvGrad(_) | Self::SendGrad(_) | Self::ReduceGrads(_) => {
                return None;
            }
        };
        Some(Pass { kind, part })
    }
}

impl From<Pass> for Action {
    fn from(pass: Pass) -> Self {
        match pass.kind {
            PassKind::Forward => Self::Forward(pass.part),
            PassKind::Backward => Self::Backward(pass.part),
            PassKind::BackwardInput => Self::BackwardInput(pass.part),
            PassKind::BackwardWeight => Self::BackwardWeight(pass.part),
        }
    }
}

impl Message {
    /// Returns the part at this end.
    #[must_use]
    pub fn part(self) -> Part {
        Part { microbatch: self.microbatch, stage: self.stage }
    }
}

impl PassKind {
    /// Returns whether it is a backward pass, or half a backward pass.
    #[must_use]
    pub fn is_backward(self) -> bool {
        self != Self::Forward
    }
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::BackwardInput => "backward input",
            Self::BackwardWeight => "backward weight",
        })
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in stage {}", self.microbatch, self.stage)
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.part)
    }
}

/// Formats as `forward 3 in stage 1` or `recv gradient 3 in stage 1 from 2`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, message, towards) = match *self {
            Self::Recv(message) => ("recv", message, "from"),
            Self::Send(message) => ("send", message, "to"),
            Self::RecvGrad(message) => ("recv gradient", message, "from"),
            Self::SendGrad(message) => ("send gradient", message, "to"),
            Self::ReduceGrads(stage) => return write!(f, "reduce gradients of stage {stage}"),
            Self::Forward(_) | Self::Backward(_) | Self::BackwardInput(_) | Self::BackwardWeight(_) => {
                return self.pass().map_or(Ok(()), |pass| pass.fmt(f));
            }
        };
        write!(f, "{name} {} {towards} {}", message.part(), message.peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_small() {
        assert_eq!((size_of::<Action>(), size_of::<Pass>()), (12, 12));
    }

    #[test]
    fn an_action_reads_well() {
        let message = Message { microbatch: 3, stage: 1, peer: 0 };
        assert_eq!(Action::Recv(message).to_string(), "recv 3 in stage 1 from 0");
        assert_eq!(Action::SendGrad(message).to_string(), "send gradient 3 in stage 1 to 0");
        assert_eq!(Action::BackwardInput(message.part()).to_string(), "backward input 3 in stage 1");
        assert_eq!(Action::ReduceGrads(2).to_string(), "reduce gradients of stage 2");
    }
}
