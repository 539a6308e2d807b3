//! Arguments of queued operations.
//!
//! A device that queues work ([`Queues`]) cannot keep the references that an operation receives. It keeps
//! tensor ranges and values ([`Argument::keep`]), and later calls the inner device with inner device tensors
//! ([`Argument::open`], [`Argument::lend`]).
//!
//! An argument is a [`Value`], a tensor, or an option, tuple, array or slice with such elements. A different
//! argument type implements [`Argument`] in the file of the operation.

use std::ops::Range;

use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Device that queues operations for an inner device.
pub(crate) trait Queues: Runtime {
    /// Device that runs the queued work.
    type Inner: Runtime;
    /// Tensor range that queued work reads or writes.
    type Place;

    /// Returns the tensor range.
    fn place(tensor: &Tensor<Self>) -> Self::Place;
    /// Queues a call in the compute lane.
    fn push(&self, places: Places<Self>, call: Call<Self::Inner>);
    /// Copies an inner device tensor over a second tensor with the same type and length.
    fn overwrite(inner: &Self::Inner, from: &Tensor<Self::Inner>, to: &mut Tensor<Self::Inner>)
    -> Result<()>;
}

/// Queued work: receives the inner device, and the read and written tensors in place order.
pub(crate) type Call<D> = Box<dyn FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()> + Send>;

/// Tensor ranges that queued work reads and writes.
pub(crate) struct Places<Q: Queues> {
    /// Read ranges.
    pub(crate) reads: Vec<Q::Place>,
    /// Written ranges.
    pub(crate) writes: Vec<Q::Place>,
}

impl<Q: Queues> Places<Q> {
    /// Creates an empty list.
    pub(crate) const fn new() -> Self {
        Self { reads: Vec::new(), writes: Vec::new() }
    }

    /// Records a tensor that is read.
    pub(crate) fn read(&mut self, tensor: &Tensor<Q>) {
        self.reads.push(Q::place(tensor));
    }

    /// Records a tensor that is written.
    pub(crate) fn write(&mut self, tensor: &Tensor<Q>) {
        self.writes.push(Q::place(tensor));
    }
}

/// Inner device tensors for queued work, taken in the order in which [`Places`] recorded them.
pub(crate) struct Operands<'a, D: Runtime> {
    /// Device that runs the work.
    pub(crate) inner: &'a D,
    reads: std::slice::Iter<'a, &'a Tensor<D>>,
    writes: std::vec::IntoIter<&'a mut Tensor<D>>,
}

impl<'a, D: Runtime> Operands<'a, D> {
    /// Accepts the tensors in all recorded places.
    pub(crate) fn new(inner: &'a D, reads: &'a [&'a Tensor<D>], writes: &'a mut [&mut Tensor<D>]) -> Self {
        let writes: Vec<&mut Tensor<D>> = writes.iter_mut().map(|tensor| &mut **tensor).collect();
        Self { inner, reads: reads.iter(), writes: writes.into_iter() }
    }

    /// Takes the next tensor that is read.
    pub(crate) fn read(&mut self) -> &'a Tensor<D> {
        self.reads.next().expect("as many operands as were recorded")
    }

    /// Takes the next tensor that is written.
    pub(crate) fn write(&mut self) -> &'a mut Tensor<D> {
        self.writes.next().expect("as many operands as were recorded")
    }
}

/// Operation argument that can be queued.
pub(crate) trait Argument<Q: Queues> {
    /// Everything apart from the tensors.
    type Kept: Send + 'static;
    /// Argument on the inner device, or host memory that the argument refers to.
    type Opened<'a>;
    /// Argument on the inner device.
    type Inner<'a>;

    /// Records the tensors and keeps the remaining values.
    fn keep(self, places: &mut Places<Q>) -> Self::Kept;
    /// Takes the tensors in the order in which they were recorded.
    fn open<'a>(kept: Self::Kept, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>>;
    /// Returns the argument for the call on the inner device.
    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b>;
}

/// Argument without tensors, passed by value, by reference or in a slice; [`values!`] implements it.
pub(crate) trait Value: Clone + Send + 'static {}

/// Implements [`Value`] and [`Argument`] for types without tensors.
macro_rules! values {
    ($($Value:ty),+) => {$(
        impl $crate::ops::argument::Value for $Value {}

        impl<Q: $crate::ops::argument::Queues> $crate::ops::argument::Argument<Q> for $Value {
            type Kept = Self;
            type Opened<'a> = Self;
            type Inner<'a> = Self;

            fn keep(self, _: &mut $crate::ops::argument::Places<Q>) -> Self {
                self
            }

            fn open(
                kept: Self,
                _: &mut $crate::ops::argument::Operands<'_, Q::Inner>,
            ) -> $crate::error::Result<Self> {
                Ok(kept)
            }

            fn lend<'b, 'a: 'b>(opened: &'b mut Self) -> Self {
                opened.clone()
            }
        }
    )+};
}
pub(crate) use values;

values!(bool, f32, f64, u32, usize, Range<usize>);

impl<Q: Queues, T: Value> Argument<Q> for &T {
    type Kept = T;
    type Opened<'a> = T;
    type Inner<'a> = &'a T;

    fn keep(self, _: &mut Places<Q>) -> T {
        self.clone()
    }

    fn open(kept: T, _: &mut Operands<'_, Q::Inner>) -> Result<T> {
        Ok(kept)
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut T) -> &'b T {
        opened
    }
}

impl<Q: Queues, T: Value> Argument<Q> for &[T] {
    type Kept = Vec<T>;
    type Opened<'a> = Vec<T>;
    type Inner<'a> = &'a [T];

    fn keep(self, _: &mut Places<Q>) -> Vec<T> {
        self.to_vec()
    }

    fn open(kept: Vec<T>, _: &mut Operands<'_, Q::Inner>) -> Result<Vec<T>> {
        Ok(kept)
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Vec<T>) -> &'b [T] {
        opened
    }
}

impl<Q: Queues> Argument<Q> for &Tensor<Q> {
    type Kept = ();
    type Opened<'a> = &'a Tensor<Q::Inner>;
    type Inner<'a> = &'a Tensor<Q::Inner>;

    fn keep(self, places: &mut Places<Q>) {
        places.read(self);
    }

    fn open<'a>((): (), operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        Ok(operands.read())
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        opened
    }
}

impl<Q: Queues> Argument<Q> for &mut Tensor<Q> {
    type Kept = ();
    type Opened<'a> = &'a mut Tensor<Q::Inner>;
    type Inner<'a> = &'a mut Tensor<Q::Inner>;

    fn keep(self, places: &mut Places<Q>) {
        places.write(self);
    }

    fn open<'a>((): (), operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        Ok(operands.write())
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        opened
    }
}

/// Tensors that are read, with a value for each.
impl<Q: Queues, T: Value> Argument<Q> for &[(&Tensor<Q>, T)] {
    type Kept = Vec<T>;
    type Opened<'a> = Vec<(&'a Tensor<Q::Inner>, T)>;
    type Inner<'a> = &'a [(&'a Tensor<Q::Inner>, T)];

    fn keep(self, places: &mut Places<Q>) -> Vec<T> {
        let keep = |(tensor, value): &(&Tensor<Q>, T)| {
            places.read(tensor);
            value.clone()
        };
        self.iter().map(keep).collect()
    }

    fn open<'a>(kept: Vec<T>, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        Ok(kept.into_iter().map(|value| (operands.read(), value)).collect())
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        opened
    }
}

impl<Q: Queues, A: Argument<Q>> Argument<Q> for Option<A> {
    type Kept = Option<A::Kept>;
    type Opened<'a> = Option<A::Opened<'a>>;
    type Inner<'a> = Option<A::Inner<'a>>;

    fn keep(self, places: &mut Places<Q>) -> Self::Kept {
        self.map(|argument| argument.keep(places))
    }

    fn open<'a>(kept: Self::Kept, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        kept.map(|kept| A::open(kept, operands)).transpose()
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        opened.as_mut().map(A::lend)
    }
}

impl<Q: Queues, A: Argument<Q>, const N: usize> Argument<Q> for [A; N] {
    type Kept = [A::Kept; N];
    type Opened<'a> = Vec<A::Opened<'a>>;
    type Inner<'a> = [A::Inner<'a>; N];

    fn keep(self, places: &mut Places<Q>) -> Self::Kept {
        self.map(|argument| argument.keep(places))
    }

    fn open<'a>(kept: Self::Kept, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        kept.into_iter().map(|kept| A::open(kept, operands)).collect()
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        let mut opened = opened.iter_mut();
        std::array::from_fn(|_| A::lend(opened.next().expect("as many as were kept")))
    }
}

/// Tuples of arguments.
macro_rules! tuple {
    ($($Argument:ident $argument:ident),+) => {
        impl<Q: Queues, $($Argument: Argument<Q>),+> Argument<Q> for ($($Argument,)+) {
            type Kept = ($($Argument::Kept,)+);
            type Opened<'a> = ($($Argument::Opened<'a>,)+);
            type Inner<'a> = ($($Argument::Inner<'a>,)+);

            fn keep(self, places: &mut Places<Q>) -> Self::Kept {
                let ($($argument,)+) = self;
                ($($argument.keep(places),)+)
            }

            fn open<'a>(kept: Self::Kept, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
                let ($($argument,)+) = kept;
                Ok(($($Argument::open($argument, operands)?,)+))
            }

            fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
                let ($($argument,)+) = opened;
                ($($Argument::lend($argument),)+)
            }
        }
    };
}

tuple!(A a);
tuple!(A a, B b);
tuple!(A a, B b, C c);
tuple!(A a, B b, C c, D d);
tuple!(A a, B b, C c, D d, E e);
tuple!(A a, B b, C c, D d, E e, F f);
tuple!(A a, B b, C c, D d, E e, F f, G g);
