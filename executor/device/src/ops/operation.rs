//! Declaration of operations: a trait that devices implement, and the queued form of every method.
//!
//! [`operation!`] accepts a trait with methods `fn name(&self, argument: Type, …) -> Result<()>`, whose
//! argument types implement [`Argument`]. A method that returns new tensors names the memory that a queuing
//! device returns: `-> Result<Tensor<Self>> in self.alloc(len)`. Methods with a body follow in
//! `provided { … }`.

use super::argument::{Argument, Operands, Places, Queues};
use crate::error::Result;
use crate::runtime::Tensor;

/// Declares an operation, and implements it for devices that queue the operations of an inner device.
macro_rules! operation {
    (
        $(#[$attribute:meta])*
        pub trait $Operation:ident: $Runtime:ident {
            $(
                $(#[$note:meta])*
                fn $name:ident(&$this:ident $(, $argument:ident: $type:ty)* $(,)?)
                -> Result<$result:ty> $(in $memory:expr)?;
            )*
            $(provided { $($provided:tt)* })?
        }
    ) => {
        $(#[$attribute])*
        pub trait $Operation: $Runtime {
            $(
                $(#[$note])*
                fn $name(&$this $(, $argument: $type)*) -> $crate::error::Result<$result>;
            )*
            $($($provided)*)?
        }

        impl<Q: $crate::ops::argument::Queues<Inner: $Operation>> $Operation for Q {
            $(
                fn $name(&$this $(, $argument: $type)*) -> $crate::error::Result<$result> {
                    let result = $crate::ops::operation::operation!(@result $($memory)?);
                    $crate::ops::operation::enqueue(
                        $this,
                        result,
                        ($($argument,)*),
                        |inner, ($($argument,)*)| $Operation::$name(inner, $($argument),*),
                    )
                }
            )*
        }
    };
    (@result) => { () };
    (@result $memory:expr) => { $memory? };
}
pub(crate) use operation;

/// Queues a call on the inner device, and returns the memory for the result.
#[expect(clippy::unnecessary_wraps, reason = "operations end with this call")]
pub(crate) fn enqueue<Q: Queues, A: Argument<Q>, R: Returned<Q>>(
    device: &Q,
    result: R,
    arguments: A,
    call: impl FnOnce(&Q::Inner, A::Inner<'_>) -> Result<R::Inner> + Send + 'static,
) -> Result<R> {
    let mut places = Places::new();
    let kept = arguments.keep(&mut places);
    result.keep(&mut places);
    let queued =
        move |inner: &Q::Inner, reads: &[&Tensor<Q::Inner>], writes: &mut [&mut Tensor<Q::Inner>]| {
            let mut operands = Operands::new(inner, reads, writes);
            let mut opened = A::open(kept, &mut operands)?;
            let computed = call(inner, A::lend(&mut opened))?;
            R::fill(computed, &mut operands)
        };
    device.push(places, Box::new(queued));
    Ok(result)
}

/// Value that an operation returns: nothing, or new tensors.
pub(crate) trait Returned<Q: Queues> {
    /// Value that the inner device returns.
    type Inner;

    /// Records the tensors as written.
    fn keep(&self, places: &mut Places<Q>);
    /// Copies the computed tensors to the recorded places.
    fn fill(computed: Self::Inner, operands: &mut Operands<'_, Q::Inner>) -> Result<()>;
}

impl<Q: Queues> Returned<Q> for () {
    type Inner = ();

    fn keep(&self, _: &mut Places<Q>) {}

    fn fill((): (), _: &mut Operands<'_, Q::Inner>) -> Result<()> {
        Ok(())
    }
}

impl<Q: Queues> Returned<Q> for Tensor<Q> {
    type Inner = Tensor<Q::Inner>;

    fn keep(&self, places: &mut Places<Q>) {
        places.write(self);
    }

    fn fill(computed: Self::Inner, operands: &mut Operands<'_, Q::Inner>) -> Result<()> {
        Q::overwrite(operands.inner, &computed, operands.write())
    }
}

impl<Q: Queues, A: Returned<Q>, B: Returned<Q>> Returned<Q> for (A, B) {
    type Inner = (A::Inner, B::Inner);

    fn keep(&self, places: &mut Places<Q>) {
        self.0.keep(places);
        self.1.keep(places);
    }

    fn fill((first, second): Self::Inner, operands: &mut Operands<'_, Q::Inner>) -> Result<()> {
        A::fill(first, operands)?;
        B::fill(second, operands)
    }
}
