//! Classifies the errors of a store: whether to retry, and what to do about them.

use std::io::{Error, ErrorKind};

use super::object::{RemoteObject, is_missing, short_reason};
use super::observed::Notes;
use super::retry::Fault;
use super::url::StoreKind;

/// Classifies an error by its status, or by its kind if no response was seen.
pub(super) fn fault_of(error: &object_store::Error, notes: Notes, store: StoreKind) -> Fault {
    let reason = short_reason(error);
    match notes.status {
        Some(412) => replaced(),
        Some(408 | 429 | 500..) => Fault::Transient { reason, retry_after: notes.retry_after },
        Some(404 | 410) => Fault::is_final(ErrorKind::NotFound, reason),
        Some(401 | 403) => {
            let reason = format!("{reason}; {}", store.credentials_hint());
            Fault::is_final(ErrorKind::PermissionDenied, reason)
        }
        Some(416) => Fault::is_final(
            ErrorKind::UnexpectedEof,
            format!("{reason}; the object is shorter than expected"),
        ),
        // The response was successful, but its headers could not be used.
        Some(200..300) => Fault::is_final(ErrorKind::InvalidData, reason),
        Some(_) => Fault::is_final(ErrorKind::Other, reason),
        None if notes.is_sent => Fault::transient(reason),
        None => unsent(error, reason, store),
    }
}

/// Classifies the error of an unobserved request: a listing, a write, or one that needs no network.
pub(super) fn unwatched(error: &object_store::Error, store: StoreKind) -> Fault {
    match error {
        object_store::Error::Generic { .. } => Fault::transient(short_reason(error)),
        _ => unsent(error, short_reason(error), store),
    }
}

fn unsent(error: &object_store::Error, reason: String, store: StoreKind) -> Fault {
    use object_store::Error as Store;
    match error {
        // Requests of registered stores are not observed: they may have been sent.
        Store::Generic { .. } if store == StoreKind::Registered => Fault::transient(reason),
        Store::Generic { .. } => Fault::Unsent { reason: format!("{reason}; {}", store.credentials_hint()) },
        Store::NotFound { .. } => Fault::is_final(ErrorKind::NotFound, reason),
        Store::Precondition { .. } => replaced(),
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => {
            Fault::is_final(ErrorKind::PermissionDenied, format!("{reason}; {}", store.credentials_hint()))
        }
        _ => Fault::is_final(ErrorKind::Other, reason),
    }
}

/// Returns the fault of an object that was replaced.
pub(super) fn replaced() -> Fault {
    let reason = "the object was replaced while it was read; leave shards in place and index them again";
    Fault::is_final(ErrorKind::InvalidData, reason)
}

/// Returns the message of an error, with advice.
pub(super) fn hinted(error: &Error, object: &RemoteObject) -> String {
    if is_missing(error) && !object.url().ends_with(".tar") {
        return format!("{error}; the URL of a directory ends with `/`");
    }
    error.to_string()
}
