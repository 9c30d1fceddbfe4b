//! Users of etcd that may do little.

use etcd_client::{Permission, UserAddOptions};

use crate::etcd::call;
use crate::{CoordError, Etcd};

/// etcd's name of the role that may do everything.
const ROOT: &str = "root";

/// What a user may do. It has no password: etcd takes it from the common name of its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub user: String,
    /// etcd's role, which is made.
    pub role: String,
    /// Prefixes of keys that it may read.
    pub reads: Vec<String>,
    /// Keys, or prefixes if they end in `/`, that it may read and write.
    pub writes: Vec<String>,
}

impl Etcd {
    /// Makes a user that may do just that. One that is there gets it in addition.
    ///
    /// # Errors
    /// If etcd does not answer, or has users already and we are none who may make others.
    pub async fn allow(&self, grant: &Grant) -> Result<(), CoordError> {
        let mut client = self.client();
        let (user, role) = (grant.user.as_str(), grant.role.as_str());
        is_there(call("role add", client.role_add(role)).await)?;
        let reads = grant.reads.iter().map(|key| Permission::read(key.as_str()).with_prefix());
        let writes = grant.writes.iter().map(|key| {
            let permission = Permission::read_write(key.as_str());
            if key.ends_with('/') { permission.with_prefix() } else { permission }
        });
        for permission in reads.chain(writes) {
            call("role grant", client.role_grant_permission(role, permission)).await?;
        }
        let keyless = Some(UserAddOptions::new().with_no_pwd());
        is_there(call("user add", client.user_add(user, "", keyless)).await)?;
        call("user grant", client.user_grant_role(user, role)).await?;
        Ok(())
    }

    /// Makes a user that may do everything.
    ///
    /// # Errors
    /// As [`Etcd::allow`].
    pub async fn allow_all(&self, user: &str) -> Result<(), CoordError> {
        let mut client = self.client();
        is_there(call("role add", client.role_add(ROOT)).await)?;
        for user in [ROOT, user] {
            let keyless = Some(UserAddOptions::new().with_no_pwd());
            is_there(call("user add", client.user_add(user, "", keyless)).await)?;
            call("user grant", client.user_grant_role(user, ROOT)).await?;
        }
        Ok(())
    }

    /// Has etcd let nobody do what it was not granted.
    ///
    /// # Errors
    /// If etcd does not answer, or has no user that may do everything.
    pub async fn enforce_grants(&self) -> Result<(), CoordError> {
        call("auth enable", self.client().auth_enable()).await.map(|_| ())
    }
}

/// What is there already is as good as made.
fn is_there<T>(made: Result<T, CoordError>) -> Result<(), CoordError> {
    match made {
        Ok(_) => Ok(()),
        Err(error) if error.to_string().contains("already exists") => Ok(()),
        Err(error) => Err(error),
    }
}
